"""Gathers and reduces over several nodes, in two hops: what enters a node enters it once.

    gather    across: from the ranks that stand like this one in the other nodes      then inside the node
    reduce    inside the node                                                          then across

Each rank brings a part of what its node needs, and each sum leaves its node as one. For that the shards of ranks that
stand alike lie side by side in a flat buffer, in a slab:

    places    | 0 1 | 2 3 |        two nodes of two ranks: slab 0 holds the shards of ranks 0 and 2,
    ranks     | 0 2 | 1 3 |        slab 1 those of ranks 1 and 3
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from shardwell.memory import StateKind, TemporaryBuffers
from shardwell.parallel.mesh import local_ranks_are_consecutive
from shardwell.parallel.traffic import TrafficKind
from shardwell.parallel.work import Work

if TYPE_CHECKING:
    from shardwell.parallel.collectives import Collectives


class HierarchicalTransport:
    """The two meshes that a world falls into: this rank's node, and the ranks that stand alike in all nodes."""

    def __init__(self, inside: Collectives, across: Collectives, scratch: TemporaryBuffers) -> None:
        self.inside, self.across, self._scratch = inside, across, scratch

    def place_of(self, rank: int) -> int:
        """Which shard of a flat buffer is a rank's own."""
        node, stand = divmod(rank, self.inside.mesh.size)
        return stand * self.across.mesh.size + node

    def gather(self, flat: Tensor, kind: TrafficKind) -> Work:
        """Fill the other ranks' shards."""
        slab = flat.chunk(self.inside.mesh.size)[self.inside.mesh.rank]
        self.across.count(kind, slab)
        self.inside.count(kind, flat)
        return self._followed(self.across.move_all_gather(slab), lambda: self.inside.move_all_gather(flat))

    def reduce(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool, kind: TrafficKind) -> Work:
        """What a node has summed is rounded to the dtype of `flat` once, and summed again in fp32 at least."""
        part = self._scratch.allocate(flat.numel() // self.inside.mesh.size, flat.dtype, StateKind.STAGING, "(staging)")
        self.inside.count(kind, flat)
        self.across.count(kind, part)
        first = self.inside.move_reduce_scatter(flat, part, 1.0, False)
        second = self._followed(first, lambda: self.across.move_reduce_scatter(part, into, scale, accumulate))
        return second.then(lambda: self._scratch.free(part))

    def _followed(self, first: Work, start: Callable[[], Work]) -> Work:
        if self.across.host_drives_progress:
            return first.then_start(start)
        # The second begins at once, behind the first on the same lane. Who waits for it ends the first as well, which
        # holds memory until then.
        return start().then(first.wait)


def ranks_per_node(world: Collectives) -> int:
    """As the launchers say, which may differ: the ranks ask each other, and all get the same answer.

    The last node may have fewer. Where that is not all (other sizes, other orders), each rank counts as a node.
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
