"""All-gather, reduce-scatter, all-reduce, all-to-all and broadcast over a group of ranks, by the fastest path.

Backend and device choose the path once:

- *point-to-point* (gloo on cpu): sends and receives directly between slices of the flat buffers. Gloo's own all-gather
  and reduce-scatter take 5 to 9 times the CPU time (its reduce-scatter is a clone and an all-reduce).
- *library* (nccl, simulated ranks, gloo on cuda): all-gather in place, reduce-scatter for 32-bit types.
  16-bit gradients are exchanged by all-to-all and summed here in fp32, on every backend: 16 bits travel, and the sum
  loses none. Gloo's reduce-scatter is avoided in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.kernels.quantize import Codec
from shardwell.memory import Device, Event, StateKind, TemporaryBuffers
from shardwell.parallel import quantized
from shardwell.parallel.agreement import Agreement
from shardwell.parallel.gloo_wait import wait_all
from shardwell.parallel.hierarchical import HierarchicalTransport
from shardwell.parallel.mesh import RankGroup
from shardwell.parallel.stragglers import Stragglers
from shardwell.parallel.sums import sum_in_rank_order
from shardwell.parallel.traffic import TrafficKind, TrafficStats
from shardwell.parallel.work import Work

_STAGING = "(staging)"
_CUT, _PROBE = (1 << 30) + 1, (1 << 30) + 2  # tags that no send uses
_FIRST_PROBE, _PROBE_EVERY = 4, 16  # counted in calls of `look`
_MOST_TOKENS = 1 << 14  # tokens with sizes that are cached


class Collectives:
    """The collectives of one engine over one mesh."""

    def __init__(self, mesh: RankGroup, device: Device, ledger: TrafficStats, scratch: TemporaryBuffers) -> None:
        self.mesh = mesh
        self.agreement: Agreement | None = None
        self.hops: HierarchicalTransport | None = None  # set if several nodes: all-gather and reduce-scatter use it
        self.leaves_the_machine = False  # some ranks are on other nodes
        self.device = device
        self._ledger = ledger
        self._scratch = scratch
        self._by_links = mesh.backend == "gloo" and device.torch_device.type == "cpu"
        self._tag = 0
        self._sized: dict[tuple[str, int, torch.dtype], str] = {}  # tokens with element count and dtype

    # -------------------------------------------------------------------------------------------- collectives

    @property
    def shard_index(self) -> int:
        """Return the index of the shard of a flat buffer that this rank owns."""
        return self.shard_index_of(self.mesh.rank)

    def shard_index_of(self, rank: int) -> int:
        """Return the index of the shard of a flat buffer that `rank` owns."""
        return rank if self.hops is None else self.hops.place_of(rank)

    @property
    def host_drives_progress(self) -> bool:
        """Whether the host has to start what follows a hop: gloo's threads, and no stream, make the progress."""
        return self.mesh.backend == "gloo"

    def all_gather(
        self, flat: Tensor, token: str | None, kind: TrafficKind = TrafficKind.GATHER, codec: Codec | None = None
    ) -> Work:
        """Start the all-gather of `flat` in place; this rank's own shard must be in it already.

        With a codec, all shards get dequantised values, this rank's own too. Without a token, the caller announced it.
        """
        self._announce(token, flat)  # also on a rank that is alone in its node: the other ranks expect the token
        if codec is not None and self.mesh.size > 1 and flat.numel():
            return quantized.all_gather(self, flat, codec, kind, self._scratch)
        return self.all_gather_path(flat, kind)

    def all_gather_codes(
        self,
        rest: Tensor,
        flat: Tensor,
        codec: Codec,
        token: str,
        copied: Callable[[], object],
        keep: quantized.Keep | None = None,
    ) -> Work:
        """Start an all-gather of quantised shards into `flat`; `rest` is this rank's own quantised shard.

        `copied` is called when the copy of `rest` is enqueued on the all-gather stream, which reads it no more after
        that. `keep` is passed the quantised shards of all ranks.
        """
        self._announce(token, flat)
        return quantized.all_gather(self, flat, codec, TrafficKind.GATHER, self._scratch, rest, copied, keep)

    def all_gather_path(self, flat: Tensor, kind: TrafficKind) -> Work:
        """Count and start an all-gather that was announced."""
        if self.hops is not None:
            return self.hops.gather(flat, kind)
        self.count(kind, flat)
        return self.move_all_gather(flat)

    def reduce_scatter(
        self,
        flat: Tensor,
        into: Tensor,
        scale: float,
        accumulate: bool,
        token: str | None,
        codecs: tuple[Codec, Codec] | None = None,
        kind: TrafficKind = TrafficKind.REDUCE,
        lost: Tensor | None = None,
    ) -> Work:
        """Start `into` = (or +=) `scale` x the sum over ranks of this rank's shard of `flat`; `flat` is invalid then.

        The sum is made in fp32 at least, in rank order with this rank first, unless the library's reduce-scatter makes
        it. `codecs` quantise inside a node and between nodes; `lost` keeps the quantisation error of the last hop,
        which is added the next time. Without a token, the caller has announced the collective.
        """
        if self.mesh.size > 1:
            self._announce(token, flat)
        if codecs is not None and self.mesh.size > 1 and flat.numel():
            path = self._path(*codecs)
            for (comm, _), size in zip(path, quantized.num_bytes(path, flat.numel()), strict=True):
                comm.count_bytes(kind, size)
            return quantized.reduce_scatter(path, flat, into, scale, accumulate, self._scratch, lost)
        if self.hops is not None:
            return self.hops.reduce(flat, into, scale, accumulate, kind)
        self.count(kind, flat)
        return self.move_reduce_scatter(flat, into, scale, accumulate)

    def residual_numel(self, numel: int, codecs: tuple[Codec, Codec]) -> int:
        """Return the number of elements that the last hop of a quantised reduce-scatter quantises."""
        return quantized.residual_numel(self._path(*codecs), numel) if self.mesh.size > 1 else 0

    def _path(self, inside: Codec, between: Codec) -> list[tuple[Collectives, Codec]]:
        """Return the hops of a quantised reduce-scatter, with the codec of each."""
        if self.hops is not None:
            return [(self.hops.inside, inside), (self.hops.across, between)]
        return [(self, between if self.leaves_the_machine else inside)]

    def move_all_to_all(self, sent: Tensor, received: Tensor) -> Work:
        """Start an equal-sized all-to-all that belongs to an announced and counted collective."""
        parts, answers = sent.chunk(self.mesh.size), received.chunk(self.mesh.size)
        if self._by_links:
            answers[self.mesh.rank].copy_(parts[self.mesh.rank])
            works = self._swap(list(zip(parts, answers, strict=True)))
            return Work(lambda: self._wait_all(works))
        with self.device.reduce_stream.after(Event()):
            work = self._guarded(dist.all_to_all_single, received, sent, group=self.mesh.group, async_op=True)
            if not self.host_drives_progress:
                work.wait()
        return Work((lambda: self._wait_all([work])) if self.host_drives_progress else None)

    def move_all_gather(self, flat: Tensor) -> Work:
        """Start an all-gather that belongs to an announced and counted collective."""
        if self.mesh.size == 1:
            return Work()
        if self._by_links:
            shards = flat.chunk(self.mesh.size)
            mine = shards[self.mesh.rank]
            works = self._swap([(mine, shard) for shard in shards])
            return Work(lambda: self._wait_all(works))
        with self.device.all_gather_stream.after_current():
            mine = flat.chunk(self.mesh.size)[self.mesh.rank]
            return self._launched(self._library_all_gather(flat, mine))

    def move_reduce_scatter(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        """Start a reduce-scatter that belongs to an announced and counted collective."""
        if self.mesh.size == 1:
            with self.device.reduce_stream.after_current():
                sum_in_rank_order([flat], into, scale, accumulate)
            return Work(self.device.reduce_stream.record().wait)
        size, rank = self.mesh.size, self.mesh.rank
        shard = flat.numel() // size
        if self._by_links:
            received = self._scratch.allocate((size - 1) * shard, flat.dtype, StateKind.STAGING, _STAGING)
            incoming = iter(received.split(shard) if shard else [received] * (size - 1))
            shards = flat.chunk(size)
            works = self._swap([(part, part if r == rank else next(incoming)) for r, part in enumerate(shards)])

            def finish() -> None:
                self._wait_all(works)
                sum_in_rank_order([shards[rank], *received.split(max(shard, 1))], into, scale, accumulate)
                self._scratch.free(received)

            return Work(finish)
        if self.mesh.backend != "gloo" and flat.dtype in (torch.float32, torch.float64):
            return self._reduce_by_library(flat, into, scale, accumulate)
        return self._reduce_by_exchange(flat, into, scale, accumulate)

    def all_to_all(self, outgoing: list[Tensor], incoming: list[Tensor], token: str) -> None:
        """Send outgoing[r] to rank r and receive incoming[r] from it. Sizes may differ; both sides must know them."""
        rank = self.mesh.rank
        incoming[rank].copy_(outgoing[rank])
        if self.mesh.size == 1:
            return
        self._announce(token)
        for source, tensor in enumerate(incoming):
            size = tensor.numel() * tensor.element_size() if source != rank else 0
            inside = size if self.mesh.is_same_node(source) else 0
            self._ledger.count(TrafficKind.STEP, inside, size - inside)
        if self._by_links:
            self._wait_all(self._swap(list(zip(outgoing, incoming, strict=True))))
            return
        sent, received = torch.cat(outgoing), torch.empty_like(torch.cat(incoming))
        sizes = [[tensor.numel() for tensor in side] for side in (incoming, outgoing)]
        self._complete(dist.all_to_all_single, received, sent, *sizes)
        for tensor, part in zip(incoming, received.split(sizes[0]), strict=True):
            tensor.copy_(part)

    def broadcast(
        self, tensor: Tensor, source: int = 0, kind: TrafficKind = TrafficKind.SETUP, token: str = "broadcast"
    ) -> None:
        """Overwrite `tensor` on every rank with the tensor of rank `source`."""
        if self.mesh.size == 1 or tensor.numel() == 0:
            return
        is_text = tensor.dtype is torch.uint8  # text has any length, which the ranks were sent before
        self._announce(token, None if is_text else tensor)
        self._count_from(source, tensor, kind)
        self._complete(dist.broadcast, tensor, src=self.mesh.global_rank(source))

    def scatter(self, flat: Tensor, into: Tensor, token: str, source: int = 0) -> None:
        """Copy this rank's shard of `source`'s `flat` to `into`; `flat` may be overwritten on the other ranks.

        Point-to-point, each rank is sent its shard. Other backends broadcast `flat`, which costs the sender the same.
        """
        start = self.shard_index * into.numel()
        if self.mesh.size > 1 and flat.numel():
            self._announce(token, into)
            self._count_from(source, into if self._by_links else flat)
            if self._by_links:
                self._wait_all(self._deal(flat, into, source))
                if self.mesh.rank != source:
                    return
            else:
                self._complete(dist.broadcast, flat, src=self.mesh.global_rank(source))
        into.copy_(flat[start : start + into.numel()])

    def _deal(self, flat: Tensor, into: Tensor, source: int) -> list[Any]:
        """Start the sends of shards by `source`, or the receive of this rank's shard."""
        self._tag = (self._tag + 1) % (1 << 30)
        arguments = {"group": self.mesh.group, "tag": self._tag}
        if self.mesh.rank != source:
            return [self._guarded(dist.irecv, into, self.mesh.global_rank(source), **arguments)]
        shards = flat.split(into.numel())
        peers = [rank for rank in range(self.mesh.size) if rank != source]
        return [
            self._guarded(dist.isend, shards[self.shard_index_of(peer)], self.mesh.global_rank(peer), **arguments)
            for peer in peers
        ]

    def _count_from(self, source: int, received: Tensor, kind: TrafficKind = TrafficKind.SETUP) -> None:
        """Count the bytes that this rank receives from `source`."""
        size = received.numel() * received.element_size() if self.mesh.rank != source else 0
        inside = size if self.mesh.is_same_node(source) else 0
        self._ledger.count(kind, inside, size - inside)

    def all_reduce_sum(self, value: Tensor, token: str) -> None:
        """Sum a small tensor over the ranks, in place."""
        if self.mesh.size == 1:
            return
        self._announce(token, value)
        size = value.numel() * value.element_size()
        self._ledger.count(TrafficKind.CONTROL, *self._hops(2 * size * (self.mesh.size - 1)))
        self._complete(dist.all_reduce, value)

    def all_reduce_min(self, value: float, token: str) -> float:
        """Return the smallest of all ranks' values."""
        if self.mesh.size == 1:
            return value
        self._announce(token)
        least = self.device.scalar(value, torch.float64)
        self._ledger.count(TrafficKind.CONTROL, *self._hops(2 * 8 * (self.mesh.size - 1)))
        self._complete(dist.all_reduce, least, dist.ReduceOp.MIN)
        return value if least.is_meta else float(least)

    def barrier(self, token: str = "barrier") -> None:
        self.all_reduce_sum(self.device.scalar(0.0), token)

    def tell_all(self, mine: bytes, token: str) -> list[bytes]:
        """All-gather the bytes of each rank, which must have the same length on all ranks."""
        if self.mesh.size == 1:
            return [mine]
        self._announce(token)
        flat = torch.zeros(self.mesh.size * len(mine), dtype=torch.uint8, device=self.device.torch_device)
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        flat.chunk(self.mesh.size)[self.mesh.rank].copy_(own)
        self.count(TrafficKind.CONTROL, flat)
        self.move_all_gather(flat).wait()
        return [bytes(part.tolist()) for part in flat.cpu().chunk(self.mesh.size)]

    # ---------------------------------------------------------------------------------- paths of the backends

    def _swap(self, pairs: list[tuple[Tensor, Tensor]]) -> list[Any]:
        """Exchange tensors with every peer: pairs[r] is (what to send to rank r, where to receive from rank r)."""
        self._tag = (self._tag + 1) % (1 << 30)
        works: list[Any] = []
        for step in range(1, self.mesh.size):
            to, source = (self.mesh.rank + step) % self.mesh.size, (self.mesh.rank - step) % self.mesh.size
            arguments = {"group": self.mesh.group, "tag": self._tag}
            if pairs[source][1].numel():
                works.append(self._guarded(dist.irecv, pairs[source][1], self.mesh.global_rank(source), **arguments))
            if pairs[to][0].numel():
                works.append(self._guarded(dist.isend, pairs[to][0], self.mesh.global_rank(to), **arguments))
        return works

    def _library_all_gather(self, flat: Tensor, mine: Tensor) -> Any:
        # gloo stages through the host, and its input must not be a part of its output
        source = mine.clone() if self.mesh.backend == "gloo" else mine
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return self._guarded(gather, flat, source, group=self.mesh.group, async_op=True)

    def _reduce_by_library(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with self.device.reduce_stream.after_current():
            mine = flat.chunk(self.mesh.size)[self.mesh.rank]
            work = self._guarded(scatter, mine, flat, group=self.mesh.group, async_op=True)
            work.wait()
            sum_in_rank_order([mine], into, scale, accumulate)
            return Work(self.device.reduce_stream.record().wait)

    def _reduce_by_exchange(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        received = self._scratch.allocate(flat.numel(), flat.dtype, StateKind.STAGING, _STAGING)
        with self.device.reduce_stream.after_current():
            work = self._guarded(dist.all_to_all_single, received, flat, group=self.mesh.group, async_op=True)

            def finish() -> None:
                with self.device.reduce_stream.after_current():
                    self._wait_all([work])
                    parts = list(received.chunk(self.mesh.size))
                    sum_in_rank_order([parts.pop(self.mesh.rank), *parts], into, scale, accumulate)
                    mark = self.device.reduce_stream.record()
                mark.wait()
                self._scratch.free(received)

            if self.mesh.backend == "gloo":
                return Work(finish)
            work.wait()
            parts = list(received.chunk(self.mesh.size))
            sum_in_rank_order([parts.pop(self.mesh.rank), *parts], into, scale, accumulate)
            mark = self.device.reduce_stream.record()
        return Work(mark.wait).then(lambda: self._scratch.free(received))

    def _launched(self, work: Any) -> Work:
        """Return the work that the caller's stream waits for; called with the all-gather stream as the current one."""
        if self.mesh.backend == "gloo":  # the backend's threads make the progress, so the host must wait
            return Work(lambda: self._wait_all([work]))
        work.wait()
        return Work(self.device.all_gather_stream.record().wait)

    # ----------------------------------------------------------------------------------------------- statistics

    def count(self, kind: TrafficKind, flat: Tensor) -> None:
        """Count the bytes of an all-gather or reduce-scatter of `flat`."""
        if self.mesh.size > 1:
            shard = flat.numel() * flat.element_size() // self.mesh.size
            self.count_bytes(kind, shard * (self.mesh.size - 1))

    def count_bytes(self, kind: TrafficKind, size: int) -> None:
        """Count bytes that come in equal parts from all peers."""
        self._ledger.count(kind, *self._hops(size))

    def _hops(self, size: int) -> tuple[int, int]:
        """Split bytes that come in equal parts from all peers into those from inside and from outside the node."""
        inside = size * self.mesh.num_local_peers // (self.mesh.size - 1)
        return inside, size - inside

    def _announce(self, token: str | None, tensor: Tensor | None = None) -> None:
        """Announce a token, with the size and dtype if all ranks take part: those of single nodes may differ."""
        if self.agreement is None or token is None:
            return
        if tensor is not None and self.mesh.size == self.agreement.size:
            key = token, tensor.numel(), tensor.dtype
            token = self._sized.get(key)
            if token is None:
                token = self._with_size(key)
        self.agreement.announce(token)

    def _with_size(self, key: tuple[str, int, torch.dtype]) -> str:
        token, numel, dtype = key
        if len(self._sized) >= _MOST_TOKENS:
            self._sized.clear()
        words = self._sized[key] = f"{token} ({numel:,} x {str(dtype).removeprefix('torch.')})"
        return words

    # ------------------------------------------------------------------------------------------------- failures

    def _complete(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start a collective of torch.distributed and wait for it."""
        self._wait_all([self._guarded(call, *args, **kwargs, group=self.mesh.group, async_op=True)])

    def _wait_all(self, works: list[Any]) -> None:
        if self._by_links and self.agreement is not None:
            self.agreement.is_waiting = True
            try:
                self._guarded(wait_all, works, self.poll_failures(), self._abandon)
            finally:
                self.agreement.is_waiting = False
            return
        for work in works:  # in this thread: on cuda the stream waits, not the host
            self._guarded(work.wait)

    def poll_failures(self) -> Callable[[], None]:
        """Return a function to call repeatedly while waiting for peers; it raises when waiting has become useless."""
        times = 0
        slow = None if self.agreement is None else Stragglers(self.agreement)

        def look() -> None:
            nonlocal times
            times += 1
            if self.agreement is not None:
                self.agreement.check_failures()
            # Probes become rarer, up to a limit, because each one posts a receive that stays posted.
            if times >= _FIRST_PROBE and (times & (times - 1) == 0 or times % _PROBE_EVERY == 0):
                if self.agreement is not None:
                    self.agreement.check_exits()
                self.probe()
            if slow is not None:
                slow.look()

        return look

    def probe(self) -> None:
        """Raise the diagnosed error if a link to another rank is broken."""
        self._guarded(self._try_links)

    def _try_links(self) -> None:
        """Raise if a peer is gone and has left no message: a receive over a broken link fails immediately."""
        if self.mesh.backend == "gloo":
            for peer in (peer for peer in range(self.mesh.size) if peer != self.mesh.rank):
                number = self.mesh.global_rank(peer)
                try:
                    dist.irecv(_nothing(), number, group=self.mesh.group, tag=_PROBE)
                except RuntimeError as error:
                    raise RuntimeError(f"the link to rank {number} is broken: {error}") from error

    def find_gone(self) -> Exception | None:
        """Return the error of a broken link, or None. It is for callers that wait for something else than a collective.

        Other ranks are not told and no links are cut, because a peer may have ended without an error. A caller that has
        waited long enough calls `lost` with the error.
        """
        try:
            self._try_links()
        except RuntimeError as error:
            return error
        return None

    def lost(self, error: Exception) -> Exception:
        """Tell the other ranks of an error that `find_gone` returned, and return the first cause."""
        return error if self.agreement is None else self.agreement.diagnose(error)

    def _abandon(self, signal: BaseException) -> None:
        """Tell the peers and cut the links: peers would still write to memory that the caller is about to free."""
        assert self.agreement is not None
        self.agreement.fail(ShardwellError(f"{type(signal).__name__} while rank {self.mesh.rank} waited for others"))

    def _guarded(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if self.agreement is None or isinstance(error, ShardwellError):
                raise
            raise self.agreement.diagnose(error) from error

    def abort_links(self) -> None:
        """Break this rank's links so that peers waiting for it wake up with an error.

        Gloo closes all connections of a group when a receive times out, so a receive that no send matches is posted.
        This needs a peer whose link is intact: over a broken link the receive fails immediately and closes none.
        """
        for route in (self.hops.inside, self.hops.across) if self.hops is not None else ():
            route.abort_links()
        if self.mesh.backend != "gloo":
            return
        for peer in range(self.mesh.size):
            if peer != self.mesh.rank:
                with contextlib.suppress(RuntimeError):
                    work = dist.irecv(_nothing(), self.mesh.global_rank(peer), group=self.mesh.group, tag=_CUT)
                    if work is not None:
                        work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Destroy the process groups that belong to this engine."""
        for route in (self.hops.inside, self.hops.across) if self.hops is not None else ():
            route.close()
        self.mesh.close()


def _nothing() -> Tensor:
    """Return a tensor for a receive that never completes. It is on the cpu, whatever the user's default device is."""
    return torch.empty(1, device="cpu")
