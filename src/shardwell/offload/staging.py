"""Staging buffers in host memory: pinned for copies to and from the device, aligned for transfers to and from disk."""

from __future__ import annotations

import queue
import threading

from torch import Tensor

from shardwell.memory import MemoryStats, StateKind, Tier
from shardwell.memory.device import Device, Waitable
from shardwell.offload.disk_queue import aligned


class PinnedAllocator:
    """Allocates pinned memory and counts it in the memory statistics."""

    def __init__(self, device: Device, memory_stats: MemoryStats) -> None:
        self._device, self._account = device, memory_stats

    def make(self, num_bytes: int, unit: str = "") -> Tensor:
        """Return a 1D tensor of bytes."""
        self._account.add(StateKind.STAGING, unit, Tier.HOST, num_bytes)
        return self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> Tensor:
        return self._device.pinned(num_bytes)

    def drop(self, memory: Tensor, unit: str = "") -> None:
        """Remove memory from the statistics. It is freed with the last reference to it."""
        self._account.remove(StateKind.STAGING, unit, Tier.HOST, memory.numel())


class AlignedAllocator(PinnedAllocator):
    """Allocates aligned memory for disk transfers and counts it; it is pinned only if the device takes part."""

    def __init__(self, device: Device, memory_stats: MemoryStats, *, pinned: bool = False) -> None:
        super().__init__(device, memory_stats)
        self._is_pinned = pinned

    def _allocate(self, num_bytes: int) -> Tensor:
        return aligned(num_bytes, self._device if self._is_pinned else None)


class StagingPool:
    """A bounded pool of staging buffers, which are allocated on first use. `take` waits while none is free.

    One thread takes buffers; any thread may give them back.
    """

    def __init__(self, pinned: PinnedAllocator, num: int, num_bytes: int) -> None:
        self._pinned, self._unmade, self._num_bytes = pinned, num, num_bytes
        self._free: queue.SimpleQueue[tuple[Tensor, Waitable]] = queue.SimpleQueue()

    def at_least(self, num_bytes: int) -> None:
        """Make buffers that are allocated from now on at least that large."""
        self._num_bytes = max(self._num_bytes, num_bytes)

    def take(self, num_bytes: int) -> Tensor:
        """Return a 1D buffer of that many bytes or more."""
        self.at_least(num_bytes)
        if self._unmade and self._free.empty():
            self._unmade -= 1
            return self._pinned.make(self._num_bytes)
        memory, mark = self._free.get()
        mark.synchronize()
        if memory.numel() < num_bytes or not mark.is_done:  # a disk that hangs may still write to it
            self._pinned.drop(memory)
            memory = self._pinned.make(self._num_bytes)
        return memory

    def give(self, memory: Tensor, after: Waitable) -> None:
        """Put a buffer back; it is free once the event has passed."""
        self._free.put((memory, after))


class ByteThrottle:
    """Bounds the bytes that wait somewhere: `add` waits until enough bytes were removed."""

    def __init__(self, most: int) -> None:
        self._most, self._num_bytes = most, 0
        self._changed = threading.Condition()

    def add(self, num_bytes: int) -> None:
        """Add bytes, and wait if the bound is exceeded. More bytes than the bound are let in alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes or self._num_bytes + num_bytes <= self._most)
            self._num_bytes += num_bytes

    def remove(self, num_bytes: int) -> None:
        """Remove bytes, and wake waiting calls of `add`."""
        with self._changed:
            self._num_bytes -= num_bytes
            self._changed.notify_all()
