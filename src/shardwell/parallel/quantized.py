"""Quantised all-gather and reduce-scatter (qwZ and qgZ of ZeRO++): fewer bytes on every hop.

An all-gather quantises this rank's shard, unless it is stored quantised, moves bytes, and dequantises all shards, its
own too: every rank computes with the same numbers. A reduce-scatter quantises what it sends to each peer, dequantises
what it receives and sums it in fp32, hop after hop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from shardwell.kernels.quantize import Codec
from shardwell.memory import Device, Event, StateKind, Stream, TemporaryBuffers
from shardwell.parallel.mesh import RankGroup
from shardwell.parallel.transport import STAGING, DirectTransport, Work

Keep = Callable[[Tensor], None]  # is passed the quantised shards of all ranks, before their memory is freed


class Gathers(Protocol):
    """An object that all-gathers the bytes of all ranks."""

    def all_gather(self, flat: Tensor) -> Work: ...


class Route(Protocol):
    """The parts that a quantised collective needs of the `Collectives` that announced and counted it."""

    @property
    def rank_group(self) -> RankGroup: ...

    @property
    def device(self) -> Device: ...

    @property
    def shard_index(self) -> int: ...

    @property
    def host_drives_progress(self) -> bool: ...

    @property
    def transport(self) -> Gathers: ...

    @property
    def direct(self) -> DirectTransport: ...


def all_gather(
    comm: Route,
    flat: Tensor,
    codec: Codec,
    temporary: TemporaryBuffers,
    rest: Tensor | None = None,
    copied: Callable[[], object] | None = None,
    keep: Keep | None = None,
) -> Work:
    """Fill all shards of `flat` with dequantised values; this rank's own shard is in it already, or stored quantised.

    `rest` is this rank's own quantised shard. `copied` is called when the copy of `rest` is enqueued on the all-gather
    stream, which reads it no more after that.
    """
    index = comm.shard_index

    def bring(memory: Tensor) -> Work:
        codes = memory.view(comm.rank_group.size, -1)
        with comm.device.all_gather_stream.after_current():
            if rest is None:
                codec.encode(flat.view(len(codes), -1)[index], codes[index])
            else:
                codes[index].copy_(rest, non_blocking=True)
        if copied is not None:
            copied()
        return comm.transport.all_gather(memory)

    return decode(comm, flat, codec, bring, temporary, keep)


def decode(
    comm: Route,
    flat: Tensor,
    codec: Codec,
    bring: Callable[[Tensor], Work],
    temporary: TemporaryBuffers,
    keep: Keep | None = None,
) -> Work:
    """Fill all shards of `flat` from the quantised shards of all ranks.

    `bring` starts to write the quantised shards to memory; `keep` is passed that memory before it is freed.
    """
    shards, stream = flat.view(comm.rank_group.size, -1), comm.device.all_gather_stream
    size = codec.num_bytes(shards.shape[1])
    memory = temporary.allocate(len(shards) * size, torch.uint8, StateKind.STAGING, STAGING)
    moved = bring(memory)

    def decoded() -> Event:
        with _behind(comm, stream):
            codec.decode(memory.view(-1, size), shards)
        return stream.record()

    def finish() -> None:
        if keep is not None:
            keep(memory)
        temporary.free(memory)

    if comm.host_drives_progress:
        return moved.then(lambda: decoded().wait()).then(finish)
    return moved.enqueue(decoded).then(finish)


def reduce_scatter(
    path: Sequence[tuple[Route, Codec]],
    flat: Tensor,
    into: Tensor,
    scale: float,
    accumulate: bool,
    temporary: TemporaryBuffers,
    residual: Tensor | None = None,
) -> Work:
    """Start `into` = (or +=) `scale` x the sum over ranks of this rank's shard of `flat`, over the hops of a path.

    `residual` (1D) is the quantisation error of the last hop of the previous call: it is added before this one
    quantises, and replaced by the new error.
    """
    (comm, codec), *rest = path
    rows = flat.view(comm.rank_group.size, -1)
    size, stream = codec.num_bytes(rows.shape[1]), comm.device.reduce_stream
    sent, received = (temporary.allocate(len(rows) * size, torch.uint8, StateKind.STAGING, STAGING) for _ in range(2))
    with stream.after_current():
        if rest or residual is None:
            codec.encode(rows, sent.view(-1, size))
        else:
            _encode_with(residual.view_as(rows), codec, rows, sent.view(-1, size), temporary)
    moved = comm.direct.all_to_all(sent, received)
    part = (
        temporary.allocate(rows.shape[1], torch.float32, StateKind.STAGING, STAGING) if rest else _wide(into, temporary)
    )

    def add_up() -> Work:
        with _behind(comm, stream):
            adds = accumulate and part is into
            codec.decode_sum(received.view(-1, size), part, 1.0 if rest else scale, add=adds)
            if not rest and part is not into:
                into.add_(part) if accumulate else into.copy_(part)
        return (
            reduce_scatter(rest, part, into, scale, accumulate, temporary, residual)
            if rest
            else Work(stream.record().wait)
        )

    def give() -> None:
        for memory in (sent, received, *(() if part is into else (part,))):
            temporary.free(memory)

    if comm.host_drives_progress:
        return (moved.then_start(add_up) if rest else moved.then(lambda: add_up().wait())).then(give)
    return add_up().then(moved.wait).then(give)


def bytes_per_peer(path: Sequence[tuple[Route, Codec]], numel: int) -> list[int]:
    """Return the bytes that this rank receives from each peer, on each hop of a quantised reduce-scatter."""
    found = []
    for comm, codec in path:
        numel //= comm.rank_group.size
        found.append(codec.num_bytes(numel))
    return found


def residual_numel(path: Sequence[tuple[Route, Codec]], numel: int) -> int:
    """Return the number of elements that the last hop of a quantised reduce-scatter quantises."""
    for comm, _ in path[:-1]:
        numel //= comm.rank_group.size
    return numel


def _encode_with(residual: Tensor, codec: Codec, rows: Tensor, codes: Tensor, temporary: TemporaryBuffers) -> None:
    """Quantise `rows` plus the earlier error `residual`; store the new error there, with non-finite values as zero."""
    total, said = (temporary.allocate(rows.numel(), torch.float32, StateKind.STAGING, STAGING) for _ in range(2))
    total.view_as(rows).copy_(rows).add_(residual)
    codec.encode(total.view_as(rows), codes)
    codec.decode(codes, said.view_as(rows))
    residual.copy_(total.sub_(said).nan_to_num_(0.0, 0.0, 0.0).view_as(rows))
    temporary.free(total)
    temporary.free(said)


def _behind(comm: Route, stream: Stream) -> AbstractContextManager[None]:
    """Return a context that enqueues work on a stream, behind a hop.

    Where the host has waited for the hop, the caller's stream is ordered behind it, but this stream is not.
    """
    return stream.after_current() if comm.host_drives_progress else stream.after(Event())


def _wide(into: Tensor, temporary: TemporaryBuffers) -> Tensor:
    """Return the fp32 tensor to sum into: `into` itself if it is fp32."""
    if into.dtype is torch.float32:
        return into
    return temporary.allocate(into.numel(), torch.float32, StateKind.STAGING, STAGING)
