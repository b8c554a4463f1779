"""What allocates the large tensors of an engine, and counts them: flat buffers, temporary buffers, the statistics.

Every large allocation of an engine is added to its `MemoryStats` when it is made and removed when it is freed. The code
that allocates does the counting; tests compare the statistics with an independent counter. Reports are rendered in
`memory/statistics.py`.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import torch
from torch import Tensor

from shardwell.memory.device import Device
from shardwell.memory.statistics import Entry, MemoryReport, StateKind, Tier

_use_count = torch._C._storage_Use_Count  # of a storage: how many tensors share it


class MemoryStats:
    """The allocated bytes of one engine, by state, unit and tier: the data behind `engine.memory()`."""

    def __init__(self) -> None:
        self._now: defaultdict[Entry, int] = defaultdict(int)
        self._peak: dict[Entry, int] = {}  # empty if the current entries are the peak and were not copied yet
        self._total = self._peak_total = 0
        self._lock = threading.RLock()  # worker threads free memory too

    def add(self, state: StateKind, unit: str, tier: Tier, size: int) -> None:
        """Count an allocation."""
        with self._lock:
            self._now[state, unit, tier] += size
            self._total += size
            if self._total > self._peak_total:
                self._peak_total = self._total
                self._peak = {}  # copied lazily, by the next decrease

    def remove(self, state: StateKind, unit: str, tier: Tier, size: int) -> None:
        """Count the freeing of an allocation."""
        with self._lock:
            if not self._peak and self._total == self._peak_total:
                self._peak = self._now.copy()
            self._now[state, unit, tier] -= size
            self._total -= size
            assert self._now[state, unit, tier] >= 0, f"{unit} gave back more {state.value} than it held"

    def set(self, state: StateKind, unit: str, tier: Tier, size: int) -> None:
        """Set the size of an entry that is measured as a total, such as an optimizer's state."""
        with self._lock:
            held = self._now[state, unit, tier]
            if size > held:
                self.add(state, unit, tier, size - held)
            elif size < held:
                self.remove(state, unit, tier, held - size)

    def report(self) -> MemoryReport:
        """Return the current and the peak bytes."""
        with self._lock:
            now = {entry: size for entry, size in self._now.items() if size}
            if not self._peak and self._total == self._peak_total:
                return MemoryReport(now, dict(now))
            return MemoryReport(now, {entry: size for entry, size in self._peak.items() if size})


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
        self._pinned_by = device if pinned else None
        if pinned:
            self.tensor = device.pinned(numel * dtype.itemsize).view(dtype)
        else:
            self.tensor = device.empty(numel, dtype, entry[2], pinned=False)
        self.nbytes = self.tensor.untyped_storage().nbytes()
        self.present = True
        self.is_aliased = False  # `present` is False, but other tensors look at the bytes, so they stay allocated
        self.is_replaced = False  # its storage could not be freed: `tensor` has another, whose views are not made yet
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
            if self._pinned_by is not None:
                self._pinned_by.unpin(self.tensor)  # or memory that is allocated there next could not be pinned
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
        self._out[id(tensor)] = tensor, state, unit
        self._stats.add(state, unit, Tier.DEVICE, numel * dtype.itemsize)
        return tensor

    def adopt(self, tensor: Tensor, state: StateKind, unit: str) -> Tensor:
        """Count a tensor that was allocated elsewhere, as if it had been allocated here."""
        self._out[id(tensor)] = tensor, state, unit
        self._stats.add(state, unit, Tier.DEVICE, tensor.numel() * tensor.element_size())
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Free a tensor. Its last use must be ordered before the caller's stream."""
        _, state, unit = self._out.pop(id(tensor))
        self._stats.remove(state, unit, Tier.DEVICE, tensor.numel() * tensor.element_size())
