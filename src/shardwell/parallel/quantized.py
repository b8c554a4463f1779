"""Quantised all-gather and reduce-scatter (qwZ and qgZ of ZeRO++): fewer bytes on every hop.

An all-gather quantises this rank's shard, unless it is stored quantised, moves bytes, and dequantises all shards, its
own too: every rank computes with the same numbers. A reduce-scatter quantises what it sends to each peer, dequantises
what it receives and sums it in fp32, hop after hop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwell.kernels.quantize import Codec
from shardwell.memory import Event, StateKind, Stream, TemporaryBuffers
from shardwell.parallel.traffic import TrafficKind
from shardwell.parallel.work import Work

if TYPE_CHECKING:
    from shardwell.parallel.collectives import Collectives

_STAGING = "(staging)"
Keep = Callable[[Tensor], None]  # is passed the quantised shards of all ranks, before their memory is freed


def all_gather(
    world: Collectives,
    flat: Tensor,
    codec: Codec,
    kind: TrafficKind,
    scratch: TemporaryBuffers,
    rest: Tensor | None = None,
    copied: Callable[[], object] | None = None,
    keep: Keep | None = None,
) -> Work:
    """Fill all shards of `flat` with dequantised values; this rank's own shard is in it already, or stored quantised.

    `rest` is this rank's own quantised shard. `copied` is called when the copy of `rest` is enqueued on the all-gather
    stream, which reads it no more after that.
    """
    place = world.shard_index

    def bring(memory: Tensor) -> Work:
        codes = memory.view(world.mesh.size, -1)
        with world.device.all_gather_stream.after_current():
            if rest is None:
                codec.encode(flat.view(len(codes), -1)[place], codes[place])
            else:
                codes[place].copy_(rest, non_blocking=True)
        if copied is not None:
            copied()
        return world.all_gather_path(memory, kind)

    return decode(world, flat, codec, bring, scratch, keep)


def decode(
    world: Collectives,
    flat: Tensor,
    codec: Codec,
    bring: Callable[[Tensor], Work],
    scratch: TemporaryBuffers,
    keep: Keep | None = None,
) -> Work:
    """Fill all shards of `flat` from the quantised shards of all ranks.

    `bring` starts to write the quantised shards to memory; `keep` is passed that memory before it is freed.
    """
    shards, lane = flat.view(world.mesh.size, -1), world.device.all_gather_stream
    size = codec.num_bytes(shards.shape[1])
    memory = scratch.allocate(len(shards) * size, torch.uint8, StateKind.STAGING, _STAGING)
    moved = bring(memory)

    def decoded() -> Event:
        with _behind(world, lane):
            codec.decode(memory.view(-1, size), shards)
        return lane.record()

    def finish() -> None:
        if keep is not None:
            keep(memory)
        scratch.free(memory)

    if world.host_drives_progress:
        return moved.then(lambda: decoded().wait()).then(finish)
    return moved.then(decoded().wait).then(finish)


def reduce_scatter(
    path: Sequence[tuple[Collectives, Codec]],
    flat: Tensor,
    into: Tensor,
    scale: float,
    accumulate: bool,
    scratch: TemporaryBuffers,
    lost: Tensor | None = None,
) -> Work:
    """Start `into` = (or +=) `scale` x the sum over ranks of this rank's shard of `flat`, over the hops of a path.

    `lost` (1D) is the quantisation error of the last hop of the previous call: it is added before this one quantises,
    and replaced by the new error.
    """
    (comm, codec), *rest = path
    rows = flat.view(comm.mesh.size, -1)
    size, lane = codec.num_bytes(rows.shape[1]), comm.device.reduce_stream
    sent, received = (scratch.allocate(len(rows) * size, torch.uint8, StateKind.STAGING, _STAGING) for _ in range(2))
    with lane.after_current():
        if rest or lost is None:
            codec.encode(rows, sent.view(-1, size))
        else:
            _encode_with(lost.view_as(rows), codec, rows, sent.view(-1, size), scratch)
    moved = comm.move_all_to_all(sent, received)
    part = scratch.allocate(rows.shape[1], torch.float32, StateKind.STAGING, _STAGING) if rest else _wide(into, scratch)

    def add_up() -> Work:
        with _behind(comm, lane):
            adds = accumulate and part is into
            codec.decode_sum(received.view(-1, size), part, 1.0 if rest else scale, add=adds)
            if not rest and part is not into:
                into.add_(part) if accumulate else into.copy_(part)
        return reduce_scatter(rest, part, into, scale, accumulate, scratch, lost) if rest else Work(lane.record().wait)

    def give() -> None:
        for memory in (sent, received, *(() if part is into else (part,))):
            scratch.free(memory)

    if comm.host_drives_progress:
        return (moved.then_start(add_up) if rest else moved.then(lambda: add_up().wait())).then(give)
    return add_up().then(moved.wait).then(give)


def num_bytes(path: Sequence[tuple[Collectives, Codec]], numel: int) -> list[int]:
    """Return the bytes that this rank receives on each hop of a quantised reduce-scatter."""
    found = []
    for comm, codec in path:
        numel //= comm.mesh.size
        found.append((comm.mesh.size - 1) * codec.num_bytes(numel))
    return found


def residual_numel(path: Sequence[tuple[Collectives, Codec]], numel: int) -> int:
    """Return the number of elements that the last hop of a quantised reduce-scatter quantises."""
    for comm, _ in path[:-1]:
        numel //= comm.mesh.size
    return numel


def _encode_with(lost: Tensor, codec: Codec, rows: Tensor, codes: Tensor, scratch: TemporaryBuffers) -> None:
    """Quantise `rows` plus the earlier error `lost`; store the new error there, with non-finite values as zero."""
    total, said = (scratch.allocate(rows.numel(), torch.float32, StateKind.STAGING, _STAGING) for _ in range(2))
    total.view_as(rows).copy_(rows).add_(lost)
    codec.encode(total.view_as(rows), codes)
    codec.decode(codes, said.view_as(rows))
    lost.copy_(total.sub_(said).nan_to_num_(0.0, 0.0, 0.0).view_as(rows))
    scratch.free(total)
    scratch.free(said)


def _behind(comm: Collectives, lane: Stream) -> AbstractContextManager[None]:
    """Return a context that enqueues work on a stream, behind a hop.

    Where the host has waited for the hop, the caller's stream is ordered behind it, but this stream is not.
    """
    return lane.after_current() if comm.host_drives_progress else lane.after(Event())


def _wide(into: Tensor, scratch: TemporaryBuffers) -> Tensor:
    """Return the fp32 tensor to sum into: `into` itself if it is fp32."""
    if into.dtype is torch.float32:
        return into
    return scratch.allocate(into.numel(), torch.float32, StateKind.STAGING, _STAGING)
