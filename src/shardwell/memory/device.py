"""A device: its streams and events, the buffers that are allocated on it, and the count of their bytes.

Only this package tells cpu, cuda and meta apart.

Every large allocation of an engine is added to its `MemoryStats` when it is made and removed when it is freed. The code
that allocates does the counting; tests compare the statistics with an independent counter. Reports are rendered in
`memory/statistics.py`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardwell import virtual_time
from shardwell.errors import ShardwellError
from shardwell.memory.host_memory import keep_freed_pages, pin, return_freed_pages, unpin
from shardwell.memory.local_gpus import bus_of
from shardwell.memory.machine import Machine, current_machine
from shardwell.memory.statistics import MemoryReport, StateKind, Tier
from shardwell.memory.streams import NO_EVENT, CudaStream, Event, ProgramOrder, Stream
from shardwell.memory.timing import Moment
from shardwell.memory.virtual_streams import virtual_event, virtual_stream

_STREAM_NAMES = ("all-gathers", "prefetches", "reduce-scatters", "copies", "uploads")
_NUM_STREAMS = len(_STREAM_NAMES)
_use_count = torch._C._storage_Use_Count  # of a storage: how many tensors share it


class Device:
    """A torch device, its streams, and all that differs between kinds of device."""

    torch_device: torch.device
    machine: Machine  # answers what bytes and cores there are
    host: torch.device  # of tensors in host memory
    has_streams: bool  # work is enqueued on CUDA streams
    is_meta: bool  # tensors have shapes but no values: nothing can be read back
    all_gather_stream: Stream  # of the all-gathers that start now: `GatherTurns` lets some be on the reduce stream
    prefetch_stream: Stream  # copies shards to the device ahead of their all-gathers
    reduce_stream: Stream
    copy_stream: Stream  # copies to the host and back
    upload_stream: Stream  # copies updated parameters to the device

    # of simulations: storages in host memory, and those of them that no statistics count
    _on_host: ClassVar[weakref.WeakSet[torch.UntypedStorage]] = weakref.WeakSet()
    uncounted_on_host: ClassVar[weakref.WeakSet[torch.UntypedStorage]] = weakref.WeakSet()

    def __init__(self, device: torch.device | str, *, keep_pages: bool = True) -> None:
        where = torch.device(device)
        is_bare_cuda = where.type == "cuda" and str(where) == "cuda"
        self.torch_device = torch.device("cuda", torch.cuda.current_device()) if is_bare_cuda else where
        self.has_streams, self.is_meta = where.type == "cuda", where.type == "meta"
        self.host = torch.device("meta" if self.is_meta else "cpu")
        self.machine = current_machine()
        if self.is_simulated and not self.is_meta:
            raise ShardwellError(f"a simulated machine has tensors without bytes: found {where}, expected meta")
        self._is_device_simulated = self.is_simulated and self.has_device_memory
        # of a simulation: storages that the statistics of an engine count
        self.counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.num_steps = 0  # of a simulation: steps of which nothing is in flight any more
        self.all_gather_stream, self.prefetch_stream, self.reduce_stream, self.copy_stream, self.upload_stream = (
            self._streams()
        )
        if keep_pages and self.torch_device.type == "cpu":
            keep_freed_pages()

    def _streams(self) -> list[Stream]:
        if self.has_streams:
            return [CudaStream(torch.cuda.Stream(self.torch_device)) for _ in range(_NUM_STREAMS)]
        if virtual_time.clock is not None and self.has_device_memory:
            return [virtual_stream(virtual_time.clock, name) for name in _STREAM_NAMES]
        return [ProgramOrder()] * _NUM_STREAMS

    @property
    def has_device_memory(self) -> bool:
        """Return whether the device has memory of its own, to which data on the host has to be copied."""
        return self.machine.has_own_memory(self.torch_device)

    @property
    def is_simulated(self) -> bool:
        """Whether neither the device nor other ranks exist."""
        return self.machine.ranks is not None

    def is_on_device(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in memory of the device's own, to which data on the host has to be copied."""
        if self.machine.ranks is None:
            return tensor.is_cuda
        if not self._is_device_simulated or tensor.layout is not torch.strided:  # sparse tensors have no storage
            return self._is_device_simulated
        return tensor.untyped_storage() not in self._on_host

    def empty(self, numel: int, dtype: torch.dtype, tier: Tier = Tier.DEVICE, *, pinned: bool = True) -> Tensor:
        """Return an uninitialised 1-D tensor on a tier.

        Host memory next to a GPU is pinned, unless only the host uses it.
        """
        if tier is Tier.DEVICE:
            return torch.empty(numel, dtype=dtype, device=self.torch_device)
        if self.is_meta:
            return self._simulated(numel, dtype)
        if self.has_streams and not pinned:
            # All threads touch the pages here: a first copy would fault them in one by one.
            return torch.empty(numel, dtype=dtype, device="cpu").zero_()
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self.has_streams and pinned)

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised 1-D tensor in host memory that no device copies from."""
        return self._simulated(numel, dtype) if self.is_meta else torch.empty(numel, dtype=dtype, device="cpu")

    def pinned(self, num_bytes: int) -> Tensor:
        """Return pinned host memory of exactly `num_bytes` (torch would round the size up)."""
        if self.is_meta:
            return self._simulated(num_bytes, torch.uint8)
        return self.pin(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))

    def _simulated(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor that stands for host memory."""
        with torch.utils._python_dispatch._disable_current_modes():  # a listener would take it for device memory
            memory = torch.empty(numel, dtype=dtype, device="meta")
        self.mark_as_host(memory)
        return memory

    def note_counted(self, tensor: Tensor) -> None:
        """Note, in a simulation, that the statistics of an engine count the storage of a tensor."""
        if self.is_meta:
            self.counted.add(tensor.untyped_storage())

    def mark_as_host(self, tensor: Tensor) -> None:
        """Note that a tensor of a simulation stands for host memory."""
        self._on_host.add(tensor.untyped_storage())

    def pin(self, memory: Tensor) -> Tensor:
        """Pin this memory, until it is freed, so that the device can copy to and from it asynchronously; return it."""
        return pin(memory) if self.has_streams else memory

    def scalar(self, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a 0-D tensor on the device."""
        return torch.full((), value, dtype=dtype, device=self.torch_device)

    def read_async(self, value: Tensor) -> AsyncScalar:
        """Start copying a small tensor to the host without waiting for it."""
        if self.has_streams:
            copy = torch.empty_like(value, device="cpu", pin_memory=True)
            copy.copy_(value, non_blocking=True)
            return AsyncScalar(copy, self.now())
        return AsyncScalar(value, NO_EVENT if virtual_time.clock is None else self.now())

    def now(self) -> Event:
        """Return an event behind the work that the current stream has been given so far."""
        if not self.has_streams:
            return Event() if virtual_time.clock is None else virtual_event(virtual_time.clock)
        event = torch.cuda.Event()
        event.record()
        return Event(event)

    def moment(self, stream: Stream | None = None) -> Moment:
        """Return the time at which a stream, by default the current one, will have done the work that it has so far."""
        if not self.has_streams:
            clock = virtual_time.clock
            return Moment(time.perf_counter() if clock is None else virtual_event(clock, stream).time)
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream.stream if isinstance(stream, CudaStream) else None)
        return Moment(time.perf_counter(), event)

    @property
    def name(self) -> str:
        """The name of the hardware, such as NVIDIA H200; of other devices than CUDA their type."""
        return torch.cuda.get_device_name(self.torch_device) if self.has_streams else self.torch_device.type

    def peak_bytes(self) -> int:
        """Return the most bytes that tensors have had on the device at a time; 0 where torch does not count them."""
        return torch.cuda.max_memory_allocated(self.torch_device) if self.has_streams else 0

    def copy_to_host(self, source: Tensor) -> tuple[Tensor, Event]:
        """Start copying a 1-D tensor to the host; the source must not be freed or changed before the event."""
        copy = self.empty(source.numel(), source.dtype, Tier.HOST)
        if self.is_meta:
            self.uncounted_on_host.add(copy.untyped_storage())
        with self.copy_stream.after_current():
            copy.copy_(source, non_blocking=True)
        return copy, self.copy_stream.record()

    def copy_from_host(self, source: Tensor) -> tuple[Tensor, Event]:
        """Start copying a 1-D tensor to the device; the copy may be read after the event, and freed at any time.

        Its memory belongs to the copy stream. The next copy that reuses it is on that stream too, ordered behind the
        work that the current stream has been given by then.
        """
        with self.copy_stream.after_current():
            copy = self.empty(source.numel(), source.dtype)
            copy.copy_(source, non_blocking=True)
        return copy, self.copy_stream.record()

    def free_bytes(self) -> float:
        """Return the device bytes that this process may have but never reserved so far; 0 where this is unknown."""
        return self.machine.unreserved_bytes(self.torch_device)

    def capacity_bytes(self) -> float:
        """Return the device bytes that this process may have; 0 where this is unknown."""
        return self.machine.capacity_bytes(self.torch_device)

    def available_bytes(self) -> float:
        """Return the device bytes that this process may have beyond those in use now; 0 where this is unknown."""
        return self.machine.available_bytes(self.torch_device)

    def workspace_bytes(self) -> int:
        """Return the device bytes that matrix products take beside their tensors, see `ThisMachine`."""
        return self.machine.workspace_bytes(self.torch_device)

    def local_gpu_buses(self) -> tuple[int, list[str]] | None:
        """Return this rank's index on its machine and the PCI addresses of all GPUs there; None where there is none."""
        if not self.has_streams:
            return None
        num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        rank = int(os.environ.get("LOCAL_RANK", "0")) % num_ranks
        return rank, [bus_of(other % torch.cuda.device_count()) for other in range(num_ranks)]

    def random_state(self) -> Tensor | None:
        """Return the state of the device's random generator; None if it has none of its own."""
        return torch.cuda.get_rng_state(self.torch_device) if self.has_streams else None

    def set_random_state(self, state: Tensor) -> None:
        if self.has_streams:
            torch.cuda.set_rng_state(state, self.torch_device)

    def trim(self) -> None:
        """Return freed memory to the system."""
        if self.has_streams:
            torch.cuda.empty_cache()
        elif self.torch_device.type == "cpu":
            return_freed_pages()


@dataclass(frozen=True)
class AsyncScalar:
    """A small tensor in flight to the host."""

    value: Tensor
    event: Event

    def get(self) -> Tensor:
        """Wait for the copy and return the value on the host; zeros stand for values that do not exist (meta)."""
        if self.event is not NO_EVENT:
            self.event.synchronize()
        return torch.zeros_like(self.value, device="cpu") if self.value.is_meta else self.value


# ------------------------------------------------------------------------------------------------ counted buffers


class _TierBytes:
    """The allocated bytes of one tier by state and unit, now and when their total was largest."""

    def __init__(self) -> None:
        self.now: defaultdict[tuple[StateKind, str], int] = defaultdict(int)
        self.total = self.peak_total = 0
        self.peak: dict[tuple[StateKind, str], int] | None = None  # None: now, and not copied yet


Changed = Callable[[StateKind, str, Tier, int], None]  # takes state, unit, tier and bytes, negative if they were freed
_changed: Changed | None = None  # of statistics that are made now


@contextlib.contextmanager
def observed_statistics(changed: Changed | None) -> Iterator[None]:
    """Let statistics that are made inside call a function after each change."""
    global _changed
    before, _changed = _changed, changed
    try:
        yield
    finally:
        _changed = before


class MemoryStats:
    """The allocated bytes of one engine, by state, unit and tier: the data behind `engine.memory()`."""

    def __init__(self) -> None:
        self._tiers = {tier: _TierBytes() for tier in Tier}
        self._lock = threading.RLock()  # worker threads free memory too
        self.changed = _changed  # is called after each change, in simulations

    def add(self, state: StateKind, unit: str, tier: Tier, size: int) -> None:
        """Count an allocation."""
        with self._lock:
            held = self._tiers[tier]
            held.now[state, unit] += size
            held.total += size
            if held.total > held.peak_total:
                held.peak_total, held.peak = held.total, None  # copied lazily, by the next decrease
            if self.changed is not None:
                self.changed(state, unit, tier, size)

    def remove(self, state: StateKind, unit: str, tier: Tier, size: int) -> None:
        """Count the freeing of an allocation."""
        with self._lock:
            held = self._tiers[tier]
            if held.peak is None:
                held.peak = held.now.copy()
            held.now[state, unit] -= size
            held.total -= size
            assert held.now[state, unit] >= 0, f"{unit} gave back more {state.value} than it held"
            if self.changed is not None:
                self.changed(state, unit, tier, -size)

    def set(self, state: StateKind, unit: str, tier: Tier, size: int) -> None:
        """Set the size of an entry that is measured as a total, such as an optimizer's state."""
        with self._lock:
            held = self._tiers[tier].now[state, unit]
            if size > held:
                self.add(state, unit, tier, size - held)
            elif size < held:
                self.remove(state, unit, tier, held - size)

    def total(self, tier: Tier) -> int:
        """Return the bytes of a tier now."""
        return self._tiers[tier].total

    def reset_peak(self) -> None:
        """Begin to look for the peaks anew."""
        with self._lock:
            for held in self._tiers.values():
                held.peak_total, held.peak = held.total, None

    def report(self) -> MemoryReport:
        """Return the current and the peak bytes."""
        with self._lock:
            tiers = [
                (tier, held.now, held.now if held.peak is None else held.peak) for tier, held in self._tiers.items()
            ]
            return MemoryReport(
                {(*key, tier): size for tier, now, _ in tiers for key, size in now.items() if size},
                {(*key, tier): size for tier, _, peak in tiers for key, size in peak.items() if size},
            )


class FlatBuffer:
    """A 1-D tensor whose storage is counted in the memory statistics, and can be freed under its views.

    `free` frees the bytes under all views, `allocate` allocates them again, uninitialised. Freeing resizes the storage
    because autograd saves views of parameters: replacing the tensor would keep every unsharded unit alive until its
    backward has run.
    """

    tensor: Tensor  # 1D
    nbytes: int

    def __init__(
        self,
        device: Device,
        memory_stats: MemoryStats,
        entry: tuple[StateKind, str, Tier],
        numel: int,
        dtype: torch.dtype,
        *,
        pinned: bool = False,
    ) -> None:
        self._stats, self._entry = memory_stats, entry
        self._is_pinned = pinned
        if pinned:
            self.tensor = device.pinned(numel * dtype.itemsize).view(dtype)
        else:
            self.tensor = device.empty(numel, dtype, entry[2], pinned=False)
        self.nbytes = self.tensor.untyped_storage().nbytes()
        self.present = True
        self.is_aliased = False  # `present` is False, but other tensors look at the bytes, so they stay allocated
        self.is_replaced = False  # its storage could not be freed: `tensor` has another, whose views are not made yet
        self._device = device
        device.note_counted(self.tensor)
        memory_stats.add(*entry, self.nbytes)

    def allocate(self) -> None:
        """Allocate the bytes again, uninitialised."""
        if not self.present and not self.is_aliased:
            self.tensor.untyped_storage().resize_(self.nbytes)
            self._stats.add(*self._entry, self.nbytes)
        self.present, self.is_aliased = True, False

    def free(self) -> None:
        """Free the bytes under all views."""
        if self.present or self.is_aliased:
            if self._is_pinned:
                unpin(self.tensor)  # or memory that is allocated there next could not be pinned
            if self.tensor.untyped_storage().resizable():
                self.tensor.untyped_storage().resize_(0)
            else:  # as numpy leaves it, once it has seen the memory
                self.tensor, self.is_replaced = torch.empty_like(self.tensor), True
            self.present = self.is_aliased = False
            self._stats.remove(*self._entry, self.nbytes)

    def end_replacing(self) -> None:
        """Free the new storage of a buffer that was replaced, once its views are of the new storage, too."""
        self.tensor.untyped_storage().resize_(0)
        self.is_replaced = False

    def free_if_unaliased(self, num_own: int) -> None:
        """Free the bytes, unless more than `num_own` tensors share them: reading freed bytes crashes.

        It may be called again for a buffer that was still seen.
        """
        if _use_count(self.tensor.untyped_storage()._cdata) > num_own:
            self.is_aliased = self.is_aliased or self.present
            self.present = False
        else:
            self.free()

    @property
    def num_aliases(self) -> int:
        """Return how many tensors share the storage, this one included."""
        return int(_use_count(self.tensor.untyped_storage()._cdata))

    def abandon_storage(self) -> None:
        """Leave the storage to the tensors that still look at it, and continue with a new, uninitialised one."""
        self.tensor = torch.empty_like(self.tensor)
        self._device.note_counted(self.tensor)

    def abandon(self) -> None:
        """Leave the storage to the tensors that still look at it, for good: it is removed from the statistics."""
        if self.present:
            self.present = False
            self._stats.remove(*self._entry, self.nbytes)
        self.tensor = self.tensor.new_empty(0)


class TemporaryBuffers:
    """An allocator of temporary 1-D tensors: gradients that are being accumulated, staging buffers of collectives.

    The allocators below reuse memory well when sizes repeat, and units repeat (glibc's once it keeps its pages, CUDA's
    always): a pool on top of them was measured to save nothing and to hold its blocks between steps. What remains to do
    here is counting. Parameters are never allocated here: autograd may hold views of them.
    """

    def __init__(self, device: Device, memory_stats: MemoryStats) -> None:
        self._device = device
        self._stats = memory_stats
        self._out: dict[int, tuple[Tensor, StateKind, str]] = {}

    def allocate(self, numel: int, dtype: torch.dtype, state: StateKind, unit: str) -> Tensor:
        """Return an uninitialised tensor."""
        tensor = self._device.empty(numel, dtype)
        self._device.note_counted(tensor)
        self._out[id(tensor)] = tensor, state, unit
        self._stats.add(state, unit, Tier.DEVICE, numel * dtype.itemsize)
        return tensor

    def adopt(self, tensor: Tensor, state: StateKind, unit: str) -> Tensor:
        """Count a tensor that was allocated elsewhere, as if it had been allocated here."""
        self._out[id(tensor)] = tensor, state, unit
        self._device.note_counted(tensor)
        self._stats.add(state, unit, Tier.DEVICE, tensor.numel() * tensor.element_size())
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Free a tensor. Its last use must be ordered before the caller's stream."""
        _, state, unit = self._out.pop(id(tensor))
        self._stats.remove(state, unit, Tier.DEVICE, tensor.numel() * tensor.element_size())
