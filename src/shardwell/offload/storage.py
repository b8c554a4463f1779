"""Storage below the device: a form of `sharding/storage.py` whose parameters or master weights are on the host or disk.

A form knows its tensors and no tier. `TieredStorage` wraps it: tensors on disk are swapped in while the form is open,
and the parameters take this way to their all-gather, as far as it can be taken ahead:

    disk  -> a read buffer (`prefetch_from_disk`) -> a copy on the device (`prefetch_to_device`) -> the flat buffer
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwell.kernels.rounding import narrow
from shardwell.memory import Device, Event, MemoryStats, StateKind, Stream, TemporaryBuffers, Tier
from shardwell.offload.disk import DiskTier
from shardwell.offload.param_swap import ReadBuffers, SwappedShard
from shardwell.offload.staging import AlignedAllocator
from shardwell.offload.swapped_tensors import SwappedTensors
from shardwell.sharding.group import ShardedGroup
from shardwell.sharding.storage import FormStorage
from shardwell.sharding.storage_form import StorageForm


@dataclass
class OffloadTiers:
    """The state that the groups of one engine, or the parameters of one `zero.Init`, store below the device."""

    device: Device
    stats: MemoryStats
    temporary: TemporaryBuffers
    num_ranks: int
    disk: DiskTier | None = None
    read_buffers: ReadBuffers | None = None  # for parameters on disk

    def read_parameters_into(self, num_buffers: int) -> None:
        """Allocate pinned buffers that parameters on disk are read into, on first use."""
        assert self.disk is not None
        pinned = AlignedAllocator(self.device, self.stats, pinned=self.device.has_device_memory)
        self.read_buffers = ReadBuffers(self.disk, pinned, num_buffers, in_order=not self.copies_ahead)

    @property
    def copies_ahead(self) -> bool:
        """Return whether parameters are copied to the device for the all-gather after the next one."""
        return self.device.has_device_memory and self.num_ranks > 1

    def wrap(self, form: FormStorage, name: str, unit: str, masters: Tier) -> TieredStorage:
        """Return the storage of a form whose parameters or `masters` are stored below the device."""
        return TieredStorage(form, name, unit, masters, self)

    def swap_out(self, tensor: Tensor, unit: str) -> SwappedTensors:
        """Store a tensor (1D) on disk."""
        assert self.disk is not None
        swapped = SwappedTensors(self.disk, self.stats, unit)
        swapped.register([tensor])
        return swapped

    def close(self) -> None:
        """Close the files on disk."""
        if self.disk is not None:
            self.disk.close()


class TieredStorage:
    """A storage of any form that is on the host or on disk, as a whole or in part."""

    is_always_open = False

    def __init__(self, form: FormStorage, name: str, unit: str, masters: Tier, tiers: OffloadTiers) -> None:
        self._name, self._unit, self._tiers = name, unit, tiers
        self.wrapped = form
        tier, disk = form.part.tier, tiers.disk
        self.can_prefetch_to_device = tier is not Tier.DEVICE and tiers.copies_ahead
        # a prefetched copy of the parameters on the device, and the event of its arrival
        self._on_device: tuple[Tensor, Event] | None = None
        self.swapped_shard: SwappedShard | None = None  # the parameters, if they are stored on disk
        self.swapped_masters: SwappedTensors | None = None  # what is stored of the master weights, if it is on disk
        if tier is Tier.DISK and disk is not None and tiers.read_buffers is not None:
            self.swapped_shard = SwappedShard(tiers.read_buffers, SwappedTensors(disk, tiers.stats, unit))
            self.swapped_shard.swapped.register([form.parameters])
            tiers.read_buffers.slots.at_least(self.swapped_shard.swapped.num_bytes)
        beside = form.beside
        if masters is Tier.DISK and disk is not None and beside is not None:
            if form.form is StorageForm.SEPARATE:  # other forms have slices of a staging buffer only
                self.swapped_masters = SwappedTensors(disk, tiers.stats, unit, form.reslice)
            else:
                self.swapped_masters = SwappedTensors(disk, tiers.stats, unit)
            self.swapped_masters.register([beside])

    @property
    def form(self) -> StorageForm:
        """Return the form that is wrapped."""
        return self.wrapped.form

    @property
    def parameters(self) -> Tensor:
        """Return this rank's part of the parameters (1D)."""
        return self.wrapped.parameters

    @property
    def master(self) -> Tensor:
        """Return the master weights (1D); their values may be used inside `open`."""
        return self.wrapped.master

    @property
    def swapped_tensors(self) -> list[SwappedTensors]:
        """Return everything that is stored on disk."""
        shard = [self.swapped_shard.swapped] if self.swapped_shard is not None else []
        return [*shard, *([self.swapped_masters] if self.swapped_masters is not None else [])]

    @contextlib.contextmanager
    def swapped_in(self, *, changes: bool = False) -> Iterator[None]:
        """Have the state on disk swapped in. The context may be nested."""
        self.cancel_prefetch()
        with contextlib.ExitStack() as stack:
            for swapped in self.swapped_tensors:
                stack.enter_context(swapped.swapped_in(changes=changes))
            yield

    @contextlib.contextmanager
    def open(self, *, changes: bool = False) -> Iterator[Tensor]:
        """Yield the master weights (1D). With `changes`, the parameters follow them at the end."""
        with self.swapped_in(changes=changes), self.wrapped.open(changes=changes) as master:
            yield master

    def write(self, master: Tensor, compute: Tensor) -> None:
        """Store new master weights; `compute` are the same values in the compute dtype, on the same device (1D)."""
        with self.swapped_in(changes=True):
            self.wrapped.write(master, compute)

    def nbytes(self) -> Counter[Tier]:
        """Return the bytes of parameters and master weights between steps, by tier."""
        return self.wrapped.nbytes()

    def free(self) -> None:
        """Free parameters and master weights, and everything that was prefetched."""
        self.cancel_prefetch()
        for swapped in self.swapped_tensors:
            swapped.free()
        self.wrapped.free()

    # ------------------------------------------------------------------------------------------ the way to the device

    def to_compute(self, out: Tensor) -> None:
        """Copy the parameters to `out` (1D, compute dtype). The current stream is that of all-gathers."""
        with self.reading(self._tiers.device.all_gather_stream) as source:
            if source.device == out.device:
                narrow(source, out)
            else:
                out.copy_(source, non_blocking=True)

    @contextlib.contextmanager
    def reading(self, stream: Stream) -> Iterator[Tensor]:
        """Yield the parameters where they can be copied from; the caller has queued its copy on `stream` at the end."""
        if self._on_device is None:
            with self._in_memory(stream) as source:
                yield source
            return
        (copy, there), self._on_device = self._on_device, None
        with stream.after(there):
            pass
        try:
            yield copy
        finally:
            # the stream that allocates this memory next
            with self._tiers.device.prefetch_stream.after(stream.record()):
                self._tiers.temporary.free(copy)

    @contextlib.contextmanager
    def _in_memory(self, stream: Stream) -> Iterator[Tensor]:
        """Yield the parameters, in a read buffer if they are on disk; the caller copies them on `stream`."""
        if self.swapped_shard is None:
            yield self.parameters
            return
        slot = self.swapped_shard.read()
        try:
            yield slot[: self.wrapped.part.buffer.nbytes].view(self.parameters.dtype)
        finally:
            self.swapped_shard.give(slot, stream.record())

    @property
    def is_on_device(self) -> bool:
        """Whether a prefetched copy of the parameters is on the device, or in flight to it."""
        return self._on_device is not None

    def prefetch_from_disk(self) -> bool:
        """Start to read parameters on disk, because their all-gather is near; false if there is nothing to read."""
        return self.swapped_shard is not None and self._on_device is None and self.swapped_shard.expect()

    def prefetch_to_device(self) -> bool:
        """Start to copy the parameters to the device, for the all-gather after the next one.

        It does nothing, and returns false, until parameters on disk have been read into memory. A single rank has no
        all-gather that this copy could overlap with, and does nothing here.
        """
        if not self.can_prefetch_to_device or self._on_device is not None:
            return False
        if self.swapped_shard is not None and not self.swapped_shard.has_come:
            return False
        temporary, stream = self._tiers.temporary, self._tiers.device.prefetch_stream
        numel, dtype = self.parameters.numel(), self.parameters.dtype
        try:
            with stream.after(Event()):
                copy = temporary.allocate(numel, dtype, StateKind.STAGING, self._unit)
        except torch.OutOfMemoryError:
            return False  # the all-gather works without it
        try:
            with self._in_memory(stream) as source, stream.after(Event()):
                copy.copy_(source, non_blocking=True)
        except BaseException:
            temporary.free(copy)
            raise
        self._on_device = copy, stream.record()
        return True

    def cancel_prefetch(self) -> None:
        """Drop prefetched copies: no all-gather is near after all, or the stored values will change."""
        if self._on_device is not None:
            # the stream that copies it is the one that allocates this memory next
            self._tiers.temporary.free(self._on_device[0])
            self._on_device = None
        if self.swapped_shard is not None:
            self.swapped_shard.forget()


def tiered_storage(group: ShardedGroup) -> TieredStorage | None:
    """Return the storage of a group if any of it is below the device, as far as that matters between steps."""
    return group.storage if isinstance(group.storage, TieredStorage) else None


def swapped_masters(group: ShardedGroup) -> SwappedTensors | None:
    """Return what is stored of a group's master weights on disk."""
    storage = tiered_storage(group)
    return None if storage is None else storage.swapped_masters


def swapped_shard(group: ShardedGroup) -> SwappedShard | None:
    """Return the parameters of a group, if they are stored on disk."""
    storage = tiered_storage(group)
    return None if storage is None else storage.swapped_shard


def swapped_tensors(group: ShardedGroup) -> list[SwappedTensors]:
    """Return everything of a group that is stored on disk."""
    storage = tiered_storage(group)
    return [] if storage is None else storage.swapped_tensors
