"""Gather, reduce and broadcast over a mesh, by the route that is fastest on its backend.

Routes, chosen once from backend and device:

- *links* (gloo, cpu): point-to-point sends straight between slices of the flat buffers. Gloo's own all-gather and
  reduce-scatter take 5 to 9 times the CPU time (its reduce-scatter is a clone and an all-reduce).
- *library* (nccl, simulated ranks, gloo on cuda): all-gather in place, reduce-scatter for 32-bit types.
  16-bit gradients are exchanged and summed here in fp32, on every backend alike: the wire carries 16 bits and the
  sum loses none. Gloo's reduce-scatter is avoided the same way.
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
_CUT, _PROBE = (1 << 30) + 1, (1 << 30) + 2  # tags that nobody sends
_FIRST_PROBE, _PROBE_EVERY = 4, 16  # looks
_MOST_TOKENS = 1 << 14  # with sizes, that are remembered


class Collectives:
    """The collectives of one engine over one mesh."""

    def __init__(self, mesh: RankGroup, device: Device, ledger: TrafficStats, scratch: TemporaryBuffers) -> None:
        self.mesh = mesh
        self.agreement: Agreement | None = None
        self.hops: HierarchicalTransport | None = (
            None  # gathers and reduces go through these, if there are several nodes
        )
        self.leaves_the_machine = False  # some ranks are on other ones
        self.device = device
        self._ledger = ledger
        self._scratch = scratch
        self._by_links = mesh.backend == "gloo" and device.torch_device.type == "cpu"
        self._tag = 0
        self._sized: dict[tuple[str, int, torch.dtype], str] = {}  # tokens with what travels

    # ---------------------------------------------------------------------------------------------- the moves

    @property
    def shard_index(self) -> int:
        """Which shard of a flat buffer is this rank's own."""
        return self.shard_index_of(self.mesh.rank)

    def shard_index_of(self, rank: int) -> int:
        return rank if self.hops is None else self.hops.place_of(rank)

    @property
    def host_drives_progress(self) -> bool:
        """Gloo's own threads make the progress: what follows a hop has to be started by the host."""
        return self.mesh.backend == "gloo"

    def all_gather(
        self, flat: Tensor, token: str | None, kind: TrafficKind = TrafficKind.GATHER, codec: Codec | None = None
    ) -> Work:
        """Fill the other ranks' shards of `flat`, in place; this rank's own shard must be in it already.

        With a codec, all shards become what was encoded of them, this rank's own too. Without a token it was announced.
        """
        self._announce(token, flat)  # also by a rank that is alone in its node: its peers' books say so
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
        """Fill `flat` with what the codes of all ranks stand for; `rest` are this rank's own. `keep` is shown all.

        `copied` is called once `rest` is needed no more behind what the lane of gathers was given.
        """
        self._announce(token, flat)
        return quantized.all_gather(self, flat, codec, TrafficKind.GATHER, self._scratch, rest, copied, keep)

    def all_gather_path(self, flat: Tensor, kind: TrafficKind) -> Work:
        """A gather that was announced."""
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
        """`into` = (or +=) `scale` x the sum over ranks of this rank's shard of `flat`; `flat` is void afterwards.

        The sum runs in fp32 at least, in rank order with this rank first. `codecs` are for what travels inside a node,
        and between nodes; `lost` keeps what those of the last hop do not say, for the next time. Without a token it was
        announced.
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
        """Elements that may lose something in the last hop of an encoded reduce."""
        return quantized.residual_numel(self._path(*codecs), numel) if self.mesh.size > 1 else 0

    def _path(self, inside: Codec, between: Codec) -> list[tuple[Collectives, Codec]]:
        """The hops of a reduce, and the codec of each."""
        if self.hops is not None:
            return [(self.hops.inside, inside), (self.hops.across, between)]
        return [(self, between if self.leaves_the_machine else inside)]

    def move_all_to_all(self, sent: Tensor, received: Tensor) -> Work:
        """Each rank gets its part of what every rank sends, as part of what was announced and counted."""
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
        """A gather, as part of what was announced and counted."""
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
        """A reduce, as part of what was announced and counted."""
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
        """Send outgoing[r] to rank r and receive incoming[r] from it. Sizes may differ, and both sides know them."""
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
        """Overwrite `tensor` on every rank with `source`'s."""
        if self.mesh.size == 1 or tensor.numel() == 0:
            return
        is_text = tensor.dtype is torch.uint8  # of any length, which was told before
        self._announce(token, None if is_text else tensor)
        self._count_from(source, tensor, kind)
        self._complete(dist.broadcast, tensor, src=self.mesh.global_rank(source))

    def scatter(self, flat: Tensor, into: Tensor, token: str, source: int = 0) -> None:
        """`into` = this rank's shard of `source`'s `flat`, which may be overwritten on the others.

        Over links each rank is sent its shard. Elsewhere all are sent the whole: to the sender it is the same.
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
        """Send each rank its shard of `source`'s."""
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
        """Enter what one rank sends to the others."""
        size = received.numel() * received.element_size() if self.mesh.rank != source else 0
        inside = size if self.mesh.is_same_node(source) else 0
        self._ledger.count(kind, inside, size - inside)

    def all_reduce_sum(self, value: Tensor, token: str) -> None:
        """Add a small tensor up over the ranks, in place."""
        if self.mesh.size == 1:
            return
        self._announce(token, value)
        size = value.numel() * value.element_size()
        self._ledger.count(TrafficKind.CONTROL, *self._hops(2 * size * (self.mesh.size - 1)))
        self._complete(dist.all_reduce, value)

    def all_reduce_min(self, value: float, token: str) -> float:
        """The smallest of all ranks' values."""
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
        """What each rank says, which is of the same length everywhere."""
        if self.mesh.size == 1:
            return [mine]
        self._announce(token)
        flat = torch.zeros(self.mesh.size * len(mine), dtype=torch.uint8, device=self.device.torch_device)
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        flat.chunk(self.mesh.size)[self.mesh.rank].copy_(own)
        self.count(TrafficKind.CONTROL, flat)
        self.move_all_gather(flat).wait()
        return [bytes(part.tolist()) for part in flat.cpu().chunk(self.mesh.size)]

    # --------------------------------------------------------------------------------------------- the routes

    def _swap(self, pairs: list[tuple[Tensor, Tensor]]) -> list[Any]:
        """Exchange with every peer: pairs[r] is (what goes to rank r, where rank r's answer lands)."""
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
        # gloo stages through the host and does not take its input from its output
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
        """Called on the lane: what the caller's lane has to wait for."""
        if self.mesh.backend == "gloo":  # progress is made by the backend's threads, the host must wait
            return Work(lambda: self._wait_all([work]))
        work.wait()
        return Work(self.device.all_gather_stream.record().wait)

    # ------------------------------------------------------------------------------------------------ the books

    def count(self, kind: TrafficKind, flat: Tensor) -> None:
        """Enter a gather or reduce of `flat`."""
        if self.mesh.size > 1:
            shard = flat.numel() * flat.element_size() // self.mesh.size
            self.count_bytes(kind, shard * (self.mesh.size - 1))

    def count_bytes(self, kind: TrafficKind, size: int) -> None:
        """Enter bytes that come evenly from all peers."""
        self._ledger.count(kind, *self._hops(size))

    def _hops(self, size: int) -> tuple[int, int]:
        """Split bytes that come evenly from all peers into those from inside and from outside the node."""
        inside = size * self.mesh.num_local_peers // (self.mesh.size - 1)
        return inside, size - inside

    def _announce(self, token: str | None, tensor: Tensor | None = None) -> None:
        """Say what comes next and, if all ranks bring as much of it, how much of what. Nodes may differ in that."""
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

    # --------------------------------------------------------------------------------------------------- faults

    def _complete(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Begin a collective of the library, and wait for it."""
        self._wait_all([self._guarded(call, *args, **kwargs, group=self.mesh.group, async_op=True)])

    def _wait_all(self, works: list[Any]) -> None:
        if self._by_links and self.agreement is not None:
            self.agreement.is_waiting = True
            try:
                self._guarded(wait_all, works, self.poll_failures(), self._abandon)
            finally:
                self.agreement.is_waiting = False
            return
        for work in works:  # in this thread: on cuda it is the lane that waits
            self._guarded(work.wait)

    def poll_failures(self) -> Callable[[], None]:
        """What is to be called again and again by who waits for others: raises if there is no use in that."""
        times = 0
        slow = None if self.agreement is None else Stragglers(self.agreement)

        def look() -> None:
            nonlocal times
            times += 1
            if self.agreement is not None:
                self.agreement.check_failures()
            # ever less often, up to a point: what is posted stays there
            if times >= _FIRST_PROBE and (times & (times - 1) == 0 or times % _PROBE_EVERY == 0):
                if self.agreement is not None:
                    self.agreement.check_exits()
                self.probe()
            if slow is not None:
                slow.look()

        return look

    def probe(self) -> None:
        """Raise what it means if a link to another rank is broken."""
        self._guarded(self._try_links)

    def _try_links(self) -> None:
        """Raise if a peer is gone and has left no word: nothing can be received over a link that is broken."""
        if self.mesh.backend == "gloo":
            for peer in (peer for peer in range(self.mesh.size) if peer != self.mesh.rank):
                number = self.mesh.global_rank(peer)
                try:
                    dist.irecv(_nothing(), number, group=self.mesh.group, tag=_PROBE)
                except RuntimeError as error:
                    raise RuntimeError(f"the link to rank {number} is broken: {error}") from error

    def find_gone(self) -> Exception | None:
        """What is wrong with a link, if a peer is gone: for who waits for something else than a collective.

        Nobody is told of it, and no links are cut: a peer may have ended well. `lost` is for who has waited enough.
        """
        try:
            self._try_links()
        except RuntimeError as error:
            return error
        return None

    def lost(self, error: Exception) -> Exception:
        """What `find_gone` found, with the first cause; the others are told."""
        return error if self.agreement is None else self.agreement.diagnose(error)

    def _abandon(self, signal: BaseException) -> None:
        """Others will write to memory that the caller is about to free: tell them, and cut the links."""
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

        Gloo closes all connections of a group when a receive times out, so one that nobody answers is posted. It takes
        a peer whose own link still stands: over one that is broken already the receive fails at once, and closes none.
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
        """Give the connections back."""
        for route in (self.hops.inside, self.hops.across) if self.hops is not None else ():
            route.close()
        self.mesh.close()


def _nothing() -> Tensor:
    """For what never comes; whatever the user's default device is."""
    return torch.empty(1, device="cpu")
