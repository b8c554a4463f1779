"""What a `torch.distributed.DeviceMesh` or Megatron's `mpu` of the user's says about the axes of the ranks.

Only the ranks are read from them. The engine makes process groups of its own, because a failing engine aborts its
links.
"""

from __future__ import annotations

import json
import operator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwell.errors import ShardwellError
from shardwell.parallel.collectives import Collectives
from shardwell.parallel.grid import AXES, Grid

# the names that people give to the dimensions of a mesh -> the axis
_NAMES = {
    "pp": "pipe",
    "pipe": "pipe",
    "dp_replicate": "replicate",
    "replicate": "replicate",
    "dp_shard": "shard",
    "shard": "shard",
    "dp": "shard",
    "data": "shard",
    "fsdp": "shard",
    "ep": "expert",
    "expert": "expert",
    "cp": "sequence",
    "sp": "sequence",
    "sequence": "sequence",
    "tp": "tensor",
    "tensor": "tensor",
    "model": "tensor",
}
_MODEL = ("pipe", "expert", "sequence", "tensor")


def grid_of_mesh(mesh: DeviceMesh, num_ranks: int, device: torch.device) -> Grid:
    """Return the grid of a mesh.

    A mesh of one dimension shards. Of two dimensions, the last shards and the first replicates, unless their names say
    something else. More dimensions, and those for parallelism inside of the model, have names.
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
    if device.type not in (mesh.device_type, "meta"):
        raise ShardwellError(
            f"initialize(mesh=...): the mesh is of {mesh.device_type} devices, and this rank trains on {device.type}."
        )
    axes = _axes_of(names, ranks.ndim, shown)
    sizes = dict(zip(axes, ranks.shape, strict=True))
    if sizes.get("replicate", 1) > 1 and sizes.get("shard", 1) * sizes.get("sequence", 1) == 1:
        raise ShardwellError(
            f"initialize(mesh=...): in {shown} the dimension that shards has one rank, so nothing would be sharded: "
            "use ZeRO stage 0 without a mesh, or a larger dimension."
        )
    order = [axes.index(axis) for axis in AXES if axis in axes]
    return Grid(**sizes, ranks=tuple(ranks.permute(order).flatten().tolist()))


def _axes_of(names: tuple[str, ...], num_dims: int, shown: str) -> list[str]:
    """Return the axis that each dimension is."""
    known = [_NAMES.get(name) for name in names]
    if not any(axis in _MODEL for axis in known) and (num_dims == 1 or None not in known or not any(known)):
        if num_dims == 1:
            return ["shard"]
        if num_dims == 2:
            is_turned = bool(names) and (known[0] == "shard" != known[1] or known[1] == "replicate")
            return ["shard", "replicate"] if is_turned else ["replicate", "shard"]
    strange = [name for name, axis in zip(names, known, strict=True) if axis is None]
    if not names or strange:
        found = f"the dimension '{strange[0]}'" if strange else f"{num_dims} dimensions without names"
        raise ShardwellError(
            f"initialize(mesh=...): {shown} has {found}. Name the dimensions: pp, dp_replicate, dp_shard or dp, ep, sp "
            "or cp, tp."
        )
    axes = [axis for axis in known if axis is not None]
    if twice := [axis for axis in axes if axes.count(axis) > 1]:
        raise ShardwellError(f"initialize(mesh=...): {shown} has two dimensions for the same axis, {twice[0]}.")
    return axes


def grid_of_mpu(mpu: Any, world: Collectives) -> Grid:
    """Return the grid that Megatron's `mpu` describes by the position of each rank. All ranks must call it.

    The data-parallel ranks of `mpu` shard; names with `tensor` and `pipeline` go before those of older versions.
    """
    sizes, position = _asked(mpu)
    if not sizes:
        raise ShardwellError(
            f"initialize(mpu=...): the {type(mpu).__name__} answers neither get_data_parallel_world_size() and "
            "get_data_parallel_rank() nor those of another axis, as Megatron's mpu does"
        )
    mine = json.dumps([sizes, position]).encode().ljust(256)
    said = [json.loads(words) for words in world.tell_all(mine, "MPU")]
    rows = [({**dict.fromkeys(AXES, 1), **one}, {**dict.fromkeys(AXES, 0), **at}) for one, at in said]
    grid = Grid(**rows[0][0])
    found = {grid.rank_at(at): rank for rank, (_, at) in enumerate(rows)} if grid.size == len(rows) else {}
    if any(one != rows[0][0] for one, _ in rows) or sorted(found) != list(range(grid.size)):
        raise ShardwellError(
            f"initialize(mpu=...): {len(rows)} rank(s) cannot be {grid}: the sizes that mpu answers must be the same "
            "on all ranks, their product the number of ranks, and each rank must have a place of its own."
        )
    return Grid(**rows[0][0], ranks=tuple(found[place] for place in range(grid.size)))


def _asked(mpu: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return the size of each axis, and this rank's index along it, as `mpu` answers."""
    sizes: dict[str, int] = {}
    position: dict[str, int] = {}
    for axis, names in {
        "tensor": ("tensor_model_parallel", "model_parallel", "slice_parallel"),
        "pipe": ("pipeline_model_parallel", "pipe_parallel"),
        "expert": ("expert_model_parallel", "expert_parallel"),
        "sequence": ("sequence_parallel", "context_parallel"),
        "shard": ("data_parallel",),
    }.items():
        for name in names:
            size, rank = getattr(mpu, f"get_{name}_world_size", None), getattr(mpu, f"get_{name}_rank", None)
            # DeepSpeed's own module has the sequence axis under the name of the model axis, too.
            is_sequence = axis == "tensor" and size == getattr(mpu, "get_sequence_parallel_world_size", None)
            if size is not None and rank is not None and not is_sequence:
                sizes[axis], position[axis] = _number(mpu, name, "world_size"), _number(mpu, name, "rank")
                break
    return sizes, position


def _number(mpu: Any, name: str, what: str) -> int:
    """Return what one of the getters of `mpu` answers."""
    answer = getattr(mpu, f"get_{name}_{what}")()
    try:
        return operator.index(answer)
    except TypeError:
        raise ShardwellError(
            f"initialize(mpu=...): get_{name}_{what}() answers {answer!r}, where a number is expected: make Megatron's "
            "groups (initialize_model_parallel) before initialize"
        ) from None
