"""A shard: this rank's slice of a group's parameters as it is stored, and its all-gather.

A shard is stored in its dtype or quantised, on the device, on the host (pinned) or on disk (a swapped shard). A
quantised shard is all-gathered in the same bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from shardwell.kernels.quantize import Codec
from shardwell.kernels.quantize_stably import quantize_stably
from shardwell.kernels.rounding import narrow
from shardwell.memory import Event, FlatBuffer, StateKind, Stream, Tier
from shardwell.offload.param_swap import SwappedShard
from shardwell.offload.swapped_tensors import SwappedTensors
from shardwell.parallel import Work, quantized
from shardwell.sharding.context import EngineContext
from shardwell.sharding.secondary import SecondaryShard
from shardwell.sharding.spec import ShardingSpec


class StoredShard:
    """The stored parameters of a group whose spec reshards them."""

    def __init__(
        self, name: str, unit: str, row: ShardingSpec, numel: int, dtype: torch.dtype, context: EngineContext
    ) -> None:
        self._name, self._unit, self._row, self._context = name, unit, row, context
        codec, tier = row.storage_codec, row.parameters.tier
        size = (numel, dtype) if codec is None else (codec.num_bytes(numel), torch.uint8)
        entry = (StateKind.PARAMETERS, unit, tier)
        self._buffer = FlatBuffer(context.device, context.account, entry, *size, pinned=tier is Tier.HOST)
        self.page: SwappedShard | None = None  # the swapped shard, if it is stored on disk
        self.is_liftable = tier is not Tier.DEVICE and context.device.has_device_memory and context.world.mesh.size > 1
        # a prefetched copy on the device, and the event of its arrival
        self._lifted: tuple[Tensor, Event] | None = None
        self.second: SecondaryShard | None = None
        if row.secondary is not None and row.secondary.axis is not None:
            self.second = SecondaryShard(name, unit, context.comm[row.secondary.axis], context.scratch)

    @property
    def tensor(self) -> Tensor:
        """Return the stored values (1D), or their quantised bytes."""
        return self._buffer.tensor

    def store(self, values: Tensor) -> None:
        """Store these values (1D); if the shard is quantised, they are in fp32."""
        codec, rests = self._row.storage_codec, self.tensor
        if codec is None:
            rests.copy_(values)
            return
        codes = rests if rests.device == values.device else torch.empty_like(rests, device=values.device)
        quantize_stably(codec, values, codes)
        if codes is not rests:
            rests.copy_(codes)

    def decode(self, values: Tensor) -> None:
        """Dequantise the shard into `values` (1D, on the tier of the shard)."""
        assert self._row.storage_codec is not None
        self._row.storage_codec.decode(self.tensor, values)

    def send_to_disk(self) -> None:
        """Swap the shard out if its tier is the disk."""
        if self._row.parameters.tier is Tier.DISK and self._context.disk and self._context.pages:
            self.page = SwappedShard(
                self._context.pages, SwappedTensors(self._context.disk, self._context.account, self._unit)
            )
            self.page.chest.register([self.tensor])

    def free(self) -> None:
        """Free the shard and everything that was prefetched of it."""
        if self.second is not None:
            self.second.forget()
        self.cancel_prefetch()
        if self.page is not None:
            self.page.chest.free()
        self._buffer.free()

    # ------------------------------------------------------------------------------------------------ all-gather

    def all_gather(self, flat: FlatBuffer, codec: Codec | None, *, keeps: bool = True) -> Work:
        """Start to fill `flat` with all shards.

        `codec` quantises the values for the all-gather only. With `keeps`, the secondary shard, if there is one, is
        filled.
        """
        second = self.second if keeps else None
        if self._row.storage_codec is not None:
            return self._all_gather_codes(flat, self._row.storage_codec, second)
        token = f"GATHER {self._name}"
        if self._row.all_gather_codec is not None and codec is None:
            token += " exactly"  # the byte count differs from that of quantised values
            second = None  # the secondary shard holds values that a codec rounded, and the caller wants exact ones
        if second is not None and second.is_there:
            flat.allocate()
            return second.gather(flat.tensor)
        world, lane = self._context.world, self._context.device.all_gather_stream
        with self._source() as source:
            flat.allocate()
            with lane.after_current():
                mine = flat.tensor.chunk(world.mesh.size)[world.shard_index]
                if source.device == mine.device:
                    narrow(source, mine)
                else:
                    mine.copy_(source, non_blocking=True)
        mark = lane.record()
        move = world.all_gather(flat.tensor, token, codec=codec)
        whole = Work(mark.wait) if world.mesh.size == 1 else move
        if second is None or second.is_there:
            return whole
        return whole.then(partial(second.keep, flat.tensor))

    def _all_gather_codes(self, flat: FlatBuffer, codec: Codec, second: SecondaryShard | None) -> Work:
        """Start the all-gather of quantised shards; the secondary shard is quantised, too."""
        world, lane = self._context.world, self._context.device.all_gather_stream
        if second is not None and second.is_there:
            flat.allocate()
            return quantized.decode(world, flat.tensor, codec, second.gather, self._context.scratch)
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(self._source())
            flat.allocate()
            if world.mesh.size > 1 and source.numel():
                keep = second.keep if second is not None else None
                return world.all_gather_codes(source, flat.tensor, codec, f"GATHER {self._name}", stack.close, keep)
            with lane.after_current():
                codec.decode(source.to(flat.tensor.device, non_blocking=True), flat.tensor)
        return Work(lane.record().wait)

    @contextlib.contextmanager
    def _source(self) -> Iterator[Tensor]:
        """Yield the stored values where they can be copied from.

        The caller has queued its copy on the all-gather stream when the context ends.
        """
        device = self._context.device
        if self._lifted is None:
            with self._below(device.all_gather_stream) as source:
                yield source
            return
        (copy, there), self._lifted = self._lifted, None
        with device.all_gather_stream.after(there):
            pass
        try:
            yield copy
        finally:
            # the stream that allocates this memory next
            with device.prefetch_stream.after(device.all_gather_stream.record()):
                self._context.scratch.free(copy)

    @contextlib.contextmanager
    def _below(self, lane: Stream) -> Iterator[Tensor]:
        """Yield the stored values, in a read buffer if they are on disk; the caller copies them on `lane`."""
        if self.page is None:
            yield self.tensor
            return
        slot = self.page.read()
        try:
            yield slot[: self._buffer.nbytes].view(self.tensor.dtype)
        finally:
            self.page.give(slot, lane.record())

    @property
    def is_on_device(self) -> bool:
        """Whether a prefetched copy of the shard is on the device, or in flight to it."""
        return self._lifted is not None

    @property
    def _leaves_its_tier(self) -> bool:
        """Whether the next all-gather needs the stored values from their tier."""
        return not self.is_on_device and (self.second is None or not self.second.is_there)

    def prefetch_from_disk(self) -> bool:
        """Start to read a shard on disk, because its all-gather is near; false if there is nothing to read."""
        return self.page is not None and self._leaves_its_tier and self.page.expect()

    def prefetch_to_device(self) -> bool:
        """Start to copy the shard to the device, for the all-gather after the next one.

        It does nothing, and returns false, until a shard on disk has been read into memory. A single rank has no
        all-gather that this copy could overlap with, and does nothing here.
        """
        if not self.is_liftable or not self._leaves_its_tier or (self.page is not None and not self.page.has_come):
            return False
        scratch, lane = self._context.scratch, self._context.device.prefetch_stream
        try:
            with lane.after(Event()):
                copy = scratch.allocate(self.tensor.numel(), self.tensor.dtype, StateKind.STAGING, self._unit)
        except torch.OutOfMemoryError:
            return False  # the all-gather works without it
        try:
            with self._below(lane) as source, lane.after(Event()):
                copy.copy_(source, non_blocking=True)
        except BaseException:
            scratch.free(copy)
            raise
        self._lifted = copy, lane.record()
        return True

    def cancel_prefetch(self) -> None:
        """Drop prefetched copies: no all-gather is near after all, or the stored values will change."""
        if self._lifted is not None:
            # the stream that copies it is the one that allocates this memory next
            self._context.scratch.free(self._lifted[0])
            self._lifted = None
        if self.page is not None:
            self.page.forget()
