"""A shard: this rank's slice of a group's parameters as it rests, and how the whole is made of all ranks' shards.

It rests in numbers or in codes, on the device, on the host (pinned) or on disk (a page). What rests in codes travels in
them.
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
    """Parameters at rest, of rows that release them."""

    def __init__(
        self, name: str, unit: str, row: ShardingSpec, numel: int, dtype: torch.dtype, context: EngineContext
    ) -> None:
        self._name, self._unit, self._row, self._context = name, unit, row, context
        codec, tier = row.storage_codec, row.parameters.tier
        size = (numel, dtype) if codec is None else (codec.num_bytes(numel), torch.uint8)
        entry = (StateKind.PARAMETERS, unit, tier)
        self._buffer = FlatBuffer(context.device, context.account, entry, *size, pinned=tier is Tier.HOST)
        self.page: SwappedShard | None = None  # that it is in, if it rests on disk
        self.is_liftable = tier is not Tier.DEVICE and context.device.has_device_memory and context.world.mesh.size > 1
        self._lifted: tuple[Tensor, Event] | None = None  # a copy on the device, and when it is there
        self.second: SecondaryShard | None = None
        if row.secondary is not None and row.secondary.axis is not None:
            self.second = SecondaryShard(name, unit, context.comm[row.secondary.axis], context.scratch)

    @property
    def tensor(self) -> Tensor:
        """1D: numbers, or codes."""
        return self._buffer.tensor

    def store(self, values: Tensor) -> None:
        """Rest as these numbers (1D), or as their codes; then those are in fp32."""
        codec, rests = self._row.storage_codec, self.tensor
        if codec is None:
            rests.copy_(values)
            return
        codes = rests if rests.device == values.device else torch.empty_like(rests, device=values.device)
        quantize_stably(codec, values, codes)
        if codes is not rests:
            rests.copy_(codes)

    def decode(self, values: Tensor) -> None:
        """The numbers (1D, where the shard is) that codes stand for."""
        assert self._row.storage_codec is not None
        self._row.storage_codec.decode(self.tensor, values)

    def send_to_disk(self) -> None:
        if self._row.parameters.tier is Tier.DISK and self._context.disk and self._context.pages:
            self.page = SwappedShard(
                self._context.pages, SwappedTensors(self._context.disk, self._context.account, self._unit)
            )
            self.page.chest.register([self.tensor])

    def free(self) -> None:
        """Let go of everything."""
        if self.second is not None:
            self.second.forget()
        self.cancel_prefetch()
        if self.page is not None:
            self.page.chest.free()
        self._buffer.free()

    # --------------------------------------------------------------------------------------------------- gathers

    def all_gather(self, flat: FlatBuffer, codec: Codec | None, *, keeps: bool = True) -> Work:
        """Start to fill `flat` with all shards; a codec is for numbers, on the way. `keeps`: a second copy, if any."""
        second = self.second if keeps else None
        if self._row.storage_codec is not None:
            return self._all_gather_codes(flat, self._row.storage_codec, second)
        token = f"GATHER {self._name}"
        if self._row.all_gather_codec is not None and codec is None:
            token += " exactly"  # other bytes travel than those of codes
            second = None  # the copy is one of codes, and somebody wants the numbers
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
        """The second copy is one of codes, too."""
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
        """What rests, where it can be copied from: whoever does is on the lane of gathers when this ends."""
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
            with device.prefetch_stream.after(device.all_gather_stream.record()):  # who takes its memory next
                self._context.scratch.free(copy)

    @contextlib.contextmanager
    def _below(self, lane: Stream) -> Iterator[Tensor]:
        """What rests, where it rests, or in a slot if that is on disk; it is copied on the lane."""
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
        return self._lifted is not None

    @property
    def _leaves_its_tier(self) -> bool:
        """The next gather needs it from where it rests."""
        return not self.is_on_device and (self.second is None or not self.second.is_there)

    def prefetch_from_disk(self) -> bool:
        """It will be gathered soon: begin to read what rests on disk."""
        return self.page is not None and self._leaves_its_tier and self.page.expect()

    def prefetch_to_device(self) -> bool:
        """It will be gathered next but one: begin to copy it to the device, unless its page has not come yet.

        A rank that is alone has no gather beside that copy, and does nothing here.
        """
        if not self.is_liftable or not self._leaves_its_tier or (self.page is not None and not self.page.has_come):
            return False
        scratch, lane = self._context.scratch, self._context.device.prefetch_stream
        try:
            with lane.after(Event()):
                copy = scratch.allocate(self.tensor.numel(), self.tensor.dtype, StateKind.STAGING, self._unit)
        except torch.OutOfMemoryError:
            return False  # the gather may do without it
        try:
            with self._below(lane) as source, lane.after(Event()):
                copy.copy_(source, non_blocking=True)
        except BaseException:
            scratch.free(copy)
            raise
        self._lifted = copy, lane.record()
        return True

    def cancel_prefetch(self) -> None:
        """It will not be gathered soon after all, or what rests will change."""
        if self._lifted is not None:
            self._context.scratch.free(self._lifted[0])  # the lane that copies it is the one that takes its memory next
            self._lifted = None
        if self.page is not None:
            self.page.forget()
