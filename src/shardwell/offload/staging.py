"""Staging buffers in host memory: pinned for copies to and from the device, aligned for transfers to and from disk."""

from __future__ import annotations

import queue
import threading

from torch import Tensor

from shardwell import virtual_time
from shardwell.memory import MemoryStats, StateKind, Tier
from shardwell.memory.device import Device
from shardwell.memory.timing import Waitable
from shardwell.memory.virtual_streams import after_thread
from shardwell.offload.disk_queue import aligned
from shardwell.virtual_time.virtual_clock import TrackPoint, VirtualClock


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

    @property
    def simulated_step(self) -> int | None:
        """The number of a simulation's step; None where memory is that of a machine that exists."""
        return self._device.num_steps if self._device.is_simulated else None

    def drop(self, memory: Tensor, unit: str = "") -> None:
        """Remove memory from the statistics. It is freed with the last reference to it."""
        self._account.remove(StateKind.STAGING, unit, Tier.HOST, memory.numel())


class AlignedAllocator(PinnedAllocator):
    """Allocates aligned memory for disk transfers and counts it; it is pinned only if the device takes part."""

    def __init__(self, device: Device, memory_stats: MemoryStats, *, pinned: bool = False) -> None:
        super().__init__(device, memory_stats)
        self._is_pinned = pinned

    def _allocate(self, num_bytes: int) -> Tensor:
        if self._device.is_meta:
            return self._device.pinned(num_bytes)
        return aligned(num_bytes, self._device if self._is_pinned else None)


class StagingPool:
    """A bounded pool of staging buffers, which are allocated on first use. `take` waits while none is free.

    One thread takes buffers; any thread may give them back. How many are allocated depends on time; a simulation, in
    which nothing takes time, allocates the most that can be: as many as are held when a step begins and taken in it.
    Where the thread that takes buffers gives them back, too, `in_order`, as many are held at a time in any run.
    """

    def __init__(self, pinned: PinnedAllocator, num: int, num_bytes: int, *, in_order: bool = False) -> None:
        self._pinned, self._unmade, self._num_bytes, self._in_order = pinned, num, num_bytes, in_order
        self._num_made = self._most_in_use = 0
        self._step = -1  # of a simulation: the step that `_most_in_use` is of
        self._free: queue.SimpleQueue[tuple[Tensor, Waitable]] = queue.SimpleQueue()

    def at_least(self, num_bytes: int) -> None:
        """Make buffers at least that large; smaller ones are replaced when they are taken next, not in later steps."""
        self._num_bytes = max(self._num_bytes, num_bytes)

    def take(self, num_bytes: int) -> Tensor:
        """Return a 1D buffer of that many bytes or more."""
        self.at_least(num_bytes)
        if self._unmade and (self._may_all_be_in_use() or self._free.empty()):
            self._unmade -= 1
            self._num_made += 1
            return self._pinned.make(self._num_bytes)
        if virtual_time.clock is not None:
            virtual_time.clock.progress_until(lambda: not self._free.empty())
        memory, mark = self._free.get()
        mark.synchronize()
        if memory.numel() < self._num_bytes or not mark.is_done:  # a disk that hangs may still write to it
            self._pinned.drop(memory)
            memory = self._pinned.make(self._num_bytes)
        return memory

    def _may_all_be_in_use(self) -> bool:
        """Return whether, in a simulation, a run may find no buffer free that was allocated before."""
        if self._in_order or (step := self._pinned.simulated_step) is None:
            return False
        if step != self._step:
            self._step, self._most_in_use = step, self._num_made - self._free.qsize()
        self._most_in_use += 1
        return self._num_made < self._most_in_use

    def give(self, memory: Tensor, after: Waitable) -> None:
        """Put a buffer back; it is free once the event has passed."""
        self._free.put((memory, after_thread(after)))


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


class VirtualThrottle(ByteThrottle):
    """A throttle of a simulation: bytes that were removed count from the time of their removal on."""

    def __init__(self, most: int, clock: VirtualClock) -> None:
        super().__init__(most)
        self._clock = clock
        self._removed: list[tuple[TrackPoint, int]] = []

    def add(self, num_bytes: int) -> None:
        """Add bytes, and let the current thread wait if the bound is exceeded."""
        while self._removed and self._removed[0][0].time <= self._clock.thread.at:
            super().remove(self._removed.pop(0)[1])
        while self._num_bytes and self._num_bytes + num_bytes > self._most:
            self._clock.progress_until(lambda: bool(self._removed))
            point, size = self._removed.pop(0)
            self._clock.thread.take_over(point.track, point.time)
            super().remove(size)
        super().add(num_bytes)

    def remove(self, num_bytes: int) -> None:
        """Remove bytes at the time of the current thread."""
        self._removed.append((self._clock.thread_now(), num_bytes))
        self._removed.sort(key=lambda pair: pair[0].time)


def throttle(most: int) -> ByteThrottle:
    """Return a throttle, in a simulation with virtual time one of its own."""
    return ByteThrottle(most) if virtual_time.clock is None else VirtualThrottle(most, virtual_time.clock)
