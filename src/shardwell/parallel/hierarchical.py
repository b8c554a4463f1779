"""Two-hop all-gather and reduce-scatter over several nodes: what enters a node enters it once.

    all-gather        across: from the ranks at the same position of the other nodes      then inside the node
    reduce-scatter    inside the node                                                     then across

Each rank brings a part of what its node needs, and each sum leaves its node once. For that, the shards of the ranks at
the same position of their nodes are adjacent in a flat buffer, in a slab:

    shards    | 0 1 | 2 3 |        two nodes of two ranks: slab 0 holds the shards of ranks 0 and 2,
    ranks     | 0 2 | 1 3 |        slab 1 those of ranks 1 and 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from shardwell.memory import StateKind, TemporaryBuffers
from shardwell.parallel.transport import STAGING, Reduction, Transport, Work


class HierarchicalTransport:
    """A transport of two hops, over this rank's node and over the ranks at the same position of all nodes."""

    def __init__(
        self,
        inside: Transport,
        across: Transport,
        temporary: TemporaryBuffers,
        *,
        node_size: int,
        local_rank: int,
        host_starts_hops: bool,
    ) -> None:
        """Join two transports.

        `host_starts_hops`: the host has to start the second hop, because no stream orders it behind the first.
        """
        self._inside, self._across, self._temporary = inside, across, temporary
        self._node_size, self._local_rank, self._host_starts_hops = node_size, local_rank, host_starts_hops

    def all_gather(self, flat: Tensor) -> Work:
        """Start an all-gather of `flat`: across the nodes first, then inside the node."""
        numel = flat.numel() // self._node_size
        slab = flat[self._local_rank * numel : (self._local_rank + 1) * numel]
        return self._followed(self._across.all_gather(slab), partial(self._inside.all_gather, flat))

    def reduce_scatter(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        """Start a reduce-scatter of `flat` into `into`: inside the node first, then across the nodes.

        The sum of a node is rounded to the dtype of `flat` once, and summed again in fp32 at least.
        """
        part = self._temporary.allocate(flat.numel() // self._node_size, flat.dtype, StateKind.STAGING, STAGING)
        first = self._inside.reduce_scatter(flat, part, 1.0, False)
        second = self._followed(first, partial(self._across.reduce_scatter, part, into, scale, accumulate))
        return second.then(partial(self._temporary.free, part))

    def all_gathers(self, flats: Sequence[Tensor]) -> Work:
        """Start all-gathers of several tensors: one collective on each hop."""
        slabs = [flat.chunk(self._node_size)[self._local_rank] for flat in flats]
        return self._followed(self._across.all_gathers(slabs), partial(self._inside.all_gathers, flats))

    def reduce_scatters(self, parts: Sequence[Reduction]) -> Work:
        """Start several reduce-scatters: one collective on each hop."""
        sums = [
            self._temporary.allocate(one.flat.numel() // self._node_size, one.flat.dtype, StateKind.STAGING, STAGING)
            for one in parts
        ]
        both = list(zip(parts, sums, strict=True))
        first = self._inside.reduce_scatters([Reduction(one.flat, own, 1.0, False) for one, own in both])
        rest = [Reduction(own, one.into, one.scale, one.accumulate) for one, own in both]
        second = self._followed(first, partial(self._across.reduce_scatters, rest))
        for own in sums:
            second.then(partial(self._temporary.free, own))
        return second

    def _followed(self, first: Work, start: Callable[[], Work]) -> Work:
        """Return the work of two hops, the second of which the host or the stream starts."""
        if self._host_starts_hops:
            return first.then_start(start)
        # The second hop is enqueued immediately, behind the first on the same stream. Waiting for it also finishes the
        # first, which holds memory until then.
        return start().then(first.wait)
