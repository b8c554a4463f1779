"""The collectives of torch.distributed (NCCL, simulated ranks, gloo on CUDA), and the transport of a single rank.

All-gather works in place, and reduce-scatter is the backend's for 32-bit types. 16-bit gradients are exchanged by
all-to-all and summed here in fp32, on every backend: 16 bits travel, and the sum loses none. Gloo's reduce-scatter is
avoided in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from shardwell import virtual_time
from shardwell.memory import Device, Event, StateKind, Stream, TemporaryBuffers
from shardwell.parallel.links import Links
from shardwell.parallel.mesh import RankGroup
from shardwell.parallel.simulated_moves import simulate_move, simulate_moves
from shardwell.parallel.transport import STAGING, Reduction, Work, in_turn, sum_in_rank_order
from shardwell.parallel.waits import Needs


class TorchTransport:
    """The collectives of torch.distributed, on the streams of the device.

    With gloo the backend's threads make the progress, so the host must wait for a work; otherwise the stream waits.
    """

    sends_shards = False

    def __init__(self, mesh: RankGroup, device: Device, links: Links, temporary: TemporaryBuffers) -> None:
        self._mesh, self._device, self._links, self._temporary = mesh, device, links, temporary
        self._is_gloo = mesh.backend == "gloo"
        self._reduce_group = mesh.group if mesh.reduce_group is None else mesh.reduce_group
        self._in_flight = links.in_flight

    def all_gather(self, flat: Tensor) -> Work:
        """Start the all-gather of `flat` in place; this rank's own shard is in it already."""
        stream = self._device.all_gather_stream
        with stream.after_current():
            mine = self._own_part(flat)
            # gloo stages through the host, and its input must not be a part of its output
            work = self._start(ALL_GATHER, flat, mine.clone() if self._is_gloo else mine, group=self._group_of(stream))
            if self._is_gloo:
                return Work(partial(self.wait, [work], self._needs()))
            work.wait()
            return Work(self._in_flight.add(stream.record()).wait)

    def reduce_scatter(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        """Start `into` = (or +=) `scale` x the sum over ranks of this rank's shard of `flat`, which becomes invalid."""
        if self._is_gloo or flat.dtype not in (torch.float32, torch.float64):
            return self._reduce_by_all_to_all(flat, into, scale, accumulate)
        with self._device.reduce_stream.after_current():
            mine = self._own_part(flat)
            self._start_reduction(REDUCE_SCATTER, mine, flat).wait()
            sum_in_rank_order([mine], into, scale, accumulate)
            return Work(self._in_flight.add(self._device.reduce_stream.record()).wait)

    def _reduce_by_all_to_all(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        received = self._temporary.allocate(flat.numel(), flat.dtype, StateKind.STAGING, STAGING)
        free, stream = partial(self._temporary.free, received), self._device.reduce_stream
        with stream.after_current():
            work = self._start_reduction(dist.all_to_all_single, received, flat)
            if self._is_gloo:
                finish = partial(self._finish_all_to_all, work, self._needs(), received, into, scale, accumulate)
                return Work(finish, free)
            work.wait()
            self._sum(received, into, scale, accumulate)
            event = self._in_flight.add(stream.record())
        return Work(event.wait, free)

    def _finish_all_to_all(
        self, work: Any, needs: Needs, received: Tensor, into: Tensor, scale: float, accumulate: bool
    ) -> None:
        """Wait on the host, then sum on the reduce stream, and order the caller's stream behind that."""
        with self._device.reduce_stream.after_current():
            self.wait([work], needs)
            self._sum(received, into, scale, accumulate)
            event = self._device.reduce_stream.record()
        event.wait()

    def _sum(self, received: Tensor, into: Tensor, scale: float, accumulate: bool) -> None:
        if self._mesh.is_simulated:  # one addition takes the memory of all
            parts = [self._own_part(received)] * 2
            if virtual_time.clock is not None:  # and all others take their time
                virtual_time.clock.kernel((self._mesh.size - 2) * (parts[0].nbytes + 2 * into.nbytes))
        else:
            parts = list(received.chunk(self._mesh.size))
            parts = [parts.pop(self._mesh.rank), *parts]
        sum_in_rank_order(parts, into, scale, accumulate)

    def all_gathers(self, flats: Sequence[Tensor]) -> Work:
        """Start all-gathers of several tensors in place: NCCL launches them as one."""
        if self._is_gloo:
            return in_turn([self.all_gather(flat) for flat in flats])
        stream = self._device.all_gather_stream
        with stream.after_current():
            self._start_together([(ALL_GATHER, flat, self._own_part(flat)) for flat in flats], self._group_of(stream))
            return Work(self._in_flight.add(stream.record()).wait)

    def reduce_scatters(self, parts: Sequence[Reduction]) -> Work:
        """Start several reduce-scatters, each as `reduce_scatter` does it: NCCL launches them as one."""
        if self._is_gloo:
            return in_turn([self.reduce_scatter(one.flat, one.into, one.scale, one.accumulate) for one in parts])
        moves: list[Any] = []
        sums, frees = [], []
        with self._device.reduce_stream.after_current():
            for one in parts:
                flat, into = one.flat, one.into
                if flat.dtype in (torch.float32, torch.float64):
                    mine = self._own_part(flat)
                    moves.append((REDUCE_SCATTER, mine, flat))
                    sums.append(partial(sum_in_rank_order, [mine], into, one.scale, one.accumulate))
                else:
                    received = self._temporary.allocate(flat.numel(), flat.dtype, StateKind.STAGING, STAGING)
                    moves.append((dist.all_to_all_single, received, flat))
                    sums.append(partial(self._sum, received, into, one.scale, one.accumulate))
                    frees.append(partial(self._temporary.free, received))
            self._start_together(moves, self._reduce_group)
            for add_up in sums:
                add_up()
            event = self._in_flight.add(self._device.reduce_stream.record())
        return Work(event.wait, *frees)

    def _start_together(self, moves: Sequence[tuple[Any, ...]], group: Any) -> None:
        """Start collectives on one communicator, and order the current stream behind all of them.

        NCCL makes them one launch, in which they share its channels. Each is the same collective as alone; only if NCCL
        chooses another algorithm for the larger launch, its own sums of more than two ranks have another order.
        """
        if self._mesh.is_simulated:
            simulate_moves([(collective, args) for collective, *args in moves], self._mesh)
            return
        group = dist.group.WORLD if group is None else group
        try:
            for work in one_launch(moves, group, self._device.torch_device, is_nccl=self._mesh.backend == "nccl"):
                work.wait()
        except RuntimeError as error:
            self._links.raise_cause(error)

    def _group_of(self, stream: Stream) -> Any:
        """Return the communicator whose collectives run on a stream."""
        return self._reduce_group if stream is self._device.reduce_stream else self._mesh.group

    def _own_part(self, flat: Tensor) -> Tensor:
        """Return this rank's part of a tensor (1D), without a view for each of the others."""
        numel = flat.numel() // self._mesh.size
        return flat[self._mesh.rank * numel : (self._mesh.rank + 1) * numel]

    def all_to_all(self, sent: Tensor, received: Tensor) -> Work:
        """Start to send the r-th of equal parts of `sent` to rank r, and to receive the r-th of `received` from it."""
        with self._device.reduce_stream.after(Event()):
            work = self._start_reduction(dist.all_to_all_single, received, sent)
            if self._is_gloo:
                return Work(partial(self.wait, [work], self._needs()))
            work.wait()
            self._in_flight.add(self._device.reduce_stream.record())
        return Work()

    def all_reduce(self, part: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        """Start `into` = (or +=) `scale` x the sum over ranks of `part`, which becomes invalid."""
        with self._device.reduce_stream.after_current():
            work = self._start_reduction(dist.all_reduce, part)
            if self._is_gloo:
                return Work(partial(self._finish_all_reduce, work, self._needs(), part, into, scale, accumulate))
            work.wait()
            sum_in_rank_order([part], into, scale, accumulate)
            return Work(self._in_flight.add(self._device.reduce_stream.record()).wait)

    def _finish_all_reduce(
        self, work: Any, needs: Needs, part: Tensor, into: Tensor, scale: float, accumulate: bool
    ) -> None:
        """Wait on the host, then scale on the reduce stream, and order the caller's stream behind that."""
        with self._device.reduce_stream.after_current():
            self.wait([work], needs)
            sum_in_rank_order([part], into, scale, accumulate)
            event = self._device.reduce_stream.record()
        event.wait()

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send outgoing[r] to rank r and receive incoming[r] from it; this rank's own parts are equal already."""
        sent, received = torch.cat(list(outgoing)), torch.empty_like(torch.cat(list(incoming)))
        sizes = [[tensor.numel() for tensor in side] for side in (incoming, outgoing)]
        self.wait([self._start(dist.all_to_all_single, received, sent, *sizes)])
        for tensor, part in zip(incoming, received.split(sizes[0]), strict=True):
            tensor.copy_(part)

    def scatter(self, flat: Tensor, into: Tensor, source: int, shard_indices: Sequence[int]) -> None:
        """Copy this rank's shard of `source`'s `flat` to `into`; shard_indices[r] is the index of rank r's shard.

        `flat` is broadcast, which costs the sender the same as to send every rank its shard.
        """
        self.wait([self._start(dist.broadcast, flat, src=self._mesh.global_rank(source))])
        start = shard_indices[self._mesh.rank] * into.numel()
        into.copy_(flat[start : start + into.numel()])

    def _needs(self) -> Needs:
        """Return what the collective that was announced last needs of the other ranks, if the host waits for it."""
        agreement, mesh = self._links.agreement, self._mesh
        if agreement is None or not self._is_gloo or mesh.is_simulated:
            return ()
        return (agreement.need([mesh.global_rank(rank) for rank in range(mesh.size) if rank != mesh.rank]),)

    def wait(self, works: list[Any], needs: Needs = ()) -> None:
        """Wait for works of torch.distributed; raise the cause if one of them fails."""
        agreement, needs = self._links.agreement, needs or self._needs()
        try:
            with agreement.waits.during(needs) if needs and agreement is not None else contextlib.nullcontext():
                for work in works:  # in this thread: on cuda the stream waits, not the host
                    work.wait()
        except RuntimeError as error:
            self._links.raise_cause(error)

    def _start_reduction(self, collective: Callable[..., Any], *args: Any) -> Any:
        """Start a collective that reduces gradients, on the communicator for these."""
        return self._start(collective, *args, group=self._reduce_group)

    def _start(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start a collective of torch.distributed; raise the cause if that fails."""
        if self._mesh.is_simulated:
            simulate_move(collective, args, self._mesh)
            return _DONE
        try:
            return collective(*args, **{"group": self._mesh.group, **kwargs}, async_op=True)
        except RuntimeError as error:
            self._links.raise_cause(error)


def one_launch(moves: Sequence[tuple[Any, ...]], group: Any, device: torch.device, *, is_nccl: bool) -> list[Any]:
    """Start collectives on one communicator, as one with NCCL; return the works.

    Process groups of torch have one operation for several all-gathers, and one for several reduce-scatters. For what
    they have none, NCCL has groups of any collectives, which torch opens and closes.
    """
    if not is_nccl:
        return [collective(*args, group=group, async_op=True) for collective, *args in moves]
    kinds = {collective for collective, *_ in moves}
    if kinds == {ALL_GATHER}:
        gathers = AllgatherOptions()
        gathers.asyncOp = True
        return [
            group.allgather_into_tensor_coalesced([out for _, out, _ in moves], [own for *_, own in moves], gathers)
        ]
    if kinds == {REDUCE_SCATTER}:
        scatters = ReduceScatterOptions()
        scatters.asyncOp = True
        return [
            group.reduce_scatter_tensor_coalesced([own for _, own, _ in moves], [all_ for *_, all_ in moves], scatters)
        ]
    group._start_coalescing(device)
    try:
        for collective, *args in moves:
            collective(*args, group=group, async_op=True)
    finally:
        work = group._end_coalescing(device)
    return [] if work is None else [work]


ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_DONE = Work()  # of collectives between ranks that do not exist


class SingleRankTransport:
    """The transport of a group of one rank, which has nothing to move."""

    sends_shards = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def all_gather(self, flat: Tensor) -> Work:
        """Return a work without anything in flight."""
        return Work()

    def reduce_scatter(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        """Start `into` = (or +=) `scale` x `flat`, on the reduce stream."""
        with self._device.reduce_stream.after_current():
            sum_in_rank_order([flat], into, scale, accumulate)
        return Work(self._device.reduce_stream.record().wait)

    def all_to_all(self, sent: Tensor, received: Tensor) -> Work:
        """Copy `sent` to `received`, on the reduce stream, as a collective would."""
        with self._device.reduce_stream.after(Event()):
            received.copy_(sent)
        return Work()

    def all_reduce(self, part: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        """Start `into` = (or +=) `scale` x `part`, on the reduce stream."""
        return self.reduce_scatter(part, into, scale, accumulate)

    def all_gathers(self, flats: Sequence[Tensor]) -> Work:
        """Return a work without anything in flight."""
        return Work()

    def reduce_scatters(self, parts: Sequence[Reduction]) -> Work:
        """Start several reduce-scatters, see `reduce_scatter`."""
        return in_turn([self.reduce_scatter(one.flat, one.into, one.scale, one.accumulate) for one in parts])

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Do nothing: this rank's own parts are equal already."""

    def scatter(self, flat: Tensor, into: Tensor, source: int, shard_indices: Sequence[int]) -> None:
        """Copy `flat` to `into`."""
        into.copy_(flat)

    def wait(self, works: list[Any], needs: Needs = ()) -> None:
        """Do nothing: there are no works."""
