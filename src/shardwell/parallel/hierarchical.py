"""Two-hop all-gather and reduce-scatter over several nodes: what enters a node enters it once.

    all-gather        across: from the ranks at the same position of the other nodes      then inside the node
    reduce-scatter    inside the node                                                     then across

Each rank brings a part of what its node needs, and each sum leaves its node once. For that, the shards of the ranks at
the same position of their nodes are adjacent in a flat buffer, in a slab:

    shards    | 0 1 | 2 3 |        two nodes of two ranks: slab 0 holds the shards of ranks 0 and 2,
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
    """The two groups that a world consists of: this rank's node, and the ranks at the same position of all nodes."""

    def __init__(self, inside: Collectives, across: Collectives, scratch: TemporaryBuffers) -> None:
        self.inside, self.across, self._scratch = inside, across, scratch

    def place_of(self, rank: int) -> int:
        """Return the index of the shard of a flat buffer that `rank` owns."""
        node, stand = divmod(rank, self.inside.mesh.size)
        return stand * self.across.mesh.size + node

    def gather(self, flat: Tensor, kind: TrafficKind) -> Work:
        """Start an all-gather of `flat`: across the nodes first, then inside the node."""
        slab = flat.chunk(self.inside.mesh.size)[self.inside.mesh.rank]
        self.across.count(kind, slab)
        self.inside.count(kind, flat)
        return self._followed(self.across.move_all_gather(slab), lambda: self.inside.move_all_gather(flat))

    def reduce(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool, kind: TrafficKind) -> Work:
        """Start a reduce-scatter of `flat` into `into`: inside the node first, then across the nodes.

        The sum of a node is rounded to the dtype of `flat` once, and summed again in fp32 at least.
        """
        part = self._scratch.allocate(flat.numel() // self.inside.mesh.size, flat.dtype, StateKind.STAGING, "(staging)")
        self.inside.count(kind, flat)
        self.across.count(kind, part)
        first = self.inside.move_reduce_scatter(flat, part, 1.0, False)
        second = self._followed(first, lambda: self.across.move_reduce_scatter(part, into, scale, accumulate))
        return second.then(lambda: self._scratch.free(part))

    def _followed(self, first: Work, start: Callable[[], Work]) -> Work:
        """Return the work of two hops, the second of which the host or the stream starts."""
        if self.across.host_drives_progress:
            return first.then_start(start)
        # The second hop is enqueued immediately, behind the first on the same stream. Waiting for it also finishes the
        # first, which holds memory until then.
        return start().then(first.wait)


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
