"""The reduce-scatter of hybrid sharding (HSDP): over the ranks that hold different shards, then over the replicas.

all-gather        in the shard group
reduce-scatter    in the shard group, then an all-reduce of each rank's shard over the ranks that replicate it
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from shardwell.memory import StateKind, TemporaryBuffers
from shardwell.parallel.transport import STAGING, DirectTransport, Reduction, Transport, Work, in_turn


class ReplicatedTransport:
    """A transport over a shard group whose sums include those of the groups that replicate it."""

    def __init__(
        self, inner: Transport, replicas: DirectTransport, temporary: TemporaryBuffers, *, host_starts_hops: bool
    ) -> None:
        """Extend the transport `inner` of the shard group by `replicas`, that of the ranks with the same shard.

        `host_starts_hops`: the host has to start the all-reduce, because no stream orders it behind the first hop.
        """
        self._inner, self._replicas, self._temporary = inner, replicas, temporary
        self._host_starts_hops = host_starts_hops

    def all_gather(self, flat: Tensor) -> Work:
        """Start the all-gather of `flat` in the shard group: it holds all shards."""
        return self._inner.all_gather(flat)

    def reduce_scatter(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        """Start `into` = (or +=) `scale` x the sum over all ranks of this rank's shard of `flat`.

        The sum of a shard group is not rounded: it is all-reduced in fp32 at least. All replicas get the same bits.
        """
        wide = torch.promote_types(flat.dtype, torch.float32)
        part = self._temporary.allocate(into.numel(), wide, StateKind.STAGING, STAGING)
        first = self._inner.reduce_scatter(flat, part, 1.0, False)
        start = partial(self._replicas.all_reduce, part, into, scale, accumulate)
        # Without the host, the all-reduce is enqueued immediately, behind the first hop on the same stream.
        second = first.then_start(start) if self._host_starts_hops else start().then(first.wait)
        return second.then(partial(self._temporary.free, part))

    def all_gathers(self, flats: Sequence[Tensor]) -> Work:
        """Start all-gathers of several tensors in the shard group, as one collective."""
        return self._inner.all_gathers(flats)

    def reduce_scatters(self, parts: Sequence[Reduction]) -> Work:
        """Start several reduce-scatters: one collective in the shard group, then an all-reduce for each."""
        wides = [torch.promote_types(one.flat.dtype, torch.float32) for one in parts]
        sums = [
            self._temporary.allocate(one.into.numel(), wide, StateKind.STAGING, STAGING)
            for one, wide in zip(parts, wides, strict=True)
        ]
        both = list(zip(parts, sums, strict=True))
        first = self._inner.reduce_scatters([Reduction(one.flat, own, 1.0, False) for one, own in both])

        def start() -> Work:
            reduce = self._replicas.all_reduce
            return in_turn([reduce(own, one.into, one.scale, one.accumulate) for one, own in both])

        second = first.then_start(start) if self._host_starts_hops else start().then(first.wait)
        for own in sums:
            second.then(partial(self._temporary.free, own))
        return second
