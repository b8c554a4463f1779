"""How the ranks of an engine are grouped into nodes."""

from __future__ import annotations

from shardwell.parallel.collectives import Collectives
from shardwell.parallel.mesh import local_ranks_are_consecutive


def ranks_per_node(world: Collectives) -> int:
    """Return the ranks per node that the launchers report, after an all-reduce: all ranks get the same answer.

    The last node may have fewer ranks. With other uneven sizes or another order of ranks, each rank counts as a node.
    """
    mesh = world.mesh
    if mesh.size == 1:
        return 1
    most = int(-world.all_reduce_min(-mesh.local_world_size, "NODES"))
    first = mesh.rank // most * most
    fits = mesh.local_world_size == min(most, mesh.size - first) and (
        most == mesh.size or local_ranks_are_consecutive(mesh.rank, most)
    )
    return most if world.all_reduce_min(float(fits), "NODES") else 1
