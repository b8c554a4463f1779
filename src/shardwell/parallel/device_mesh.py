"""What a `torch.distributed.DeviceMesh` of the user's means for ZeRO: which ranks shard, and which replicate.

Only the ranks are read from it. The engine makes process groups of its own, because a failing engine aborts its links.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwell.errors import ShardwellError

_REPLICATES, _SHARDS = ("dp_replicate", "replicate"), ("dp_shard", "shard")
_OTHER_AXES = ("tp", "pp", "cp", "sp", "ep")


def rows_of(mesh: DeviceMesh, num_ranks: int, device: torch.device) -> list[list[int]]:
    """Return the shard groups of a mesh, each as the list of its ranks; replicas are at the same position of each.

    A mesh of one dimension has one row. Of two dimensions, the last shards and the first replicates, unless their
    names say that it is the other way round.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ShardwellError(f"initialize(mesh=...): expected a torch DeviceMesh, found a {type(mesh).__name__}")
    names, ranks = mesh.mesh_dim_names or (), mesh.mesh
    shown = f"a mesh of shape {tuple(ranks.shape)}" + (f" with dimensions {tuple(names)}" if names else "")
    if sorted(ranks.flatten().tolist()) != list(range(num_ranks)):
        raise ShardwellError(
            f"initialize(mesh=...): {shown} does not hold each of the {num_ranks} rank(s) of the default process group "
            "once: build it with init_device_mesh over all ranks."
        )
    others = [name for name in names if name in _OTHER_AXES]
    if ranks.ndim > 2 or others:
        found = f"the dimension '{others[0]}'" if others else f"{ranks.ndim} dimensions"
        raise ShardwellError(
            f"initialize(mesh=...): {shown} has {found}, and only data-parallel dimensions are supported yet: one that "
            "shards, or one that replicates and one that shards."
        )
    if device.type not in (mesh.device_type, "meta"):
        raise ShardwellError(
            f"initialize(mesh=...): the mesh is of {mesh.device_type} devices, and this rank trains on {device.type}."
        )
    if ranks.ndim < 2:
        return [ranks.flatten().tolist()]
    is_turned = bool(names) and (names[0] in _SHARDS or names[1] in _REPLICATES)
    rows: list[list[int]] = (ranks.T if is_turned else ranks).tolist()
    if len(rows) > 1 and len(rows[0]) == 1:
        raise ShardwellError(
            f"initialize(mesh=...): in {shown} the dimension that shards has one rank, so nothing would be sharded: "
            "use ZeRO stage 0 without a mesh, or a larger dimension."
        )
    return rows
