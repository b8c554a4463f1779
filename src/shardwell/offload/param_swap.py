"""Parameters that are stored on disk: they pass through pinned staging buffers on the way to the device.

    disk     | read 4 | read 5  | read 6  |
    bus               | copy 4  | copy 5  | copy 6   |
    links                       | all-gather 4 | all-gather 5 | all-gather 6 |
    device                                     | use 4        | use 5        | use 6 |

A swapped shard is stored on disk, and there are a few slots that shards are read into. The scheduler announces the
shards that it will need soon. The device waits for these reads and for no others, so they have precedence. A single
rank all-gathers straight from a slot, because there is no other work beside the copy.
"""

from __future__ import annotations

import math
import time

from torch import Tensor

from shardwell.memory import Event
from shardwell.memory.timing import AllOf, Waitable
from shardwell.offload.disk import DiskTier, DiskTransfer
from shardwell.offload.staging import AlignedAllocator, StagingPool
from shardwell.offload.swapped_tensors import SwappedTensors

_MEMORY = 8  # number of units and shards that the averages go back


class ReadAheadDepth:
    """The number of units that a shard is read ahead: as many as are used during one read.

    Time that units wait for shards does not count as time of use. So if the disk is the bottleneck, reads start as
    early as the number of slots allows.
    """

    def __init__(self, most: int, *, is_simulated: bool = False) -> None:
        """Let reads begin as early as the slots allow if `is_simulated`: nothing takes time there."""
        self._most, self._is_simulated = most, is_simulated
        self._unit = 0.0  # average seconds that a unit is used
        self._page = 0.0  # seconds that a read takes, the longest of the recent ones
        self._since: float | None = None  # when the unit in use was entered

    @property
    def depth(self) -> int:
        """The number of units to read ahead."""
        if self._is_simulated:
            return self._most
        return min(self._most, max(1, math.ceil(self._page / self._unit))) if self._unit else 1

    def enter(self) -> None:
        """Note that the next unit is used from now on."""
        now = time.monotonic()
        if self._since is not None:
            used = max(0.0, now - self._since)
            self._unit += (used - self._unit) / _MEMORY if self._unit else used
        self._since = now

    def pause(self) -> None:
        """Note that no unit is used for a while."""
        self._since = None

    def note(self, seconds: float, waited: float) -> None:
        """Note a finished read: the seconds from its request to its end, and how many of them the caller waited."""
        self._page = max(seconds, self._page * (1 - 1 / _MEMORY))
        if self._since is not None:
            self._since += waited


class ReadBuffers:
    """The slots of an engine. All but one of them may hold shards that were read ahead."""

    def __init__(self, tier: DiskTier, memory: AlignedAllocator, num_slots: int, *, in_order: bool = False) -> None:
        """Make no slots yet. They are given back `in_order` if nothing copies them ahead, once their read has ended."""
        self.tier = tier
        self._most_ahead = max(1, num_slots - 1)
        self.slots = StagingPool(memory, self._most_ahead + 1, 0, in_order=in_order)
        self.num_ahead = 0  # shards that were read ahead and not used yet
        self.pace = ReadAheadDepth(self._most_ahead, is_simulated=tier.is_simulated)

    @property
    def has_room(self) -> bool:
        """Whether another shard may be read ahead."""
        return self.num_ahead < self._most_ahead


class SwappedShard:
    """One tensor on disk. Only one thread may use it at a time; its `swapped` tensors may be used by several."""

    def __init__(self, buffers: ReadBuffers, swapped: SwappedTensors) -> None:
        self.swapped = swapped
        self._buffers = buffers
        self._coming: tuple[Tensor, list[DiskTransfer]] | None = None

    def expect(self) -> bool:
        """Start to read it ahead, if a slot is free and the tensor is neither in use nor still being written."""
        if self._coming is not None or not self._buffers.has_room or self.swapped.is_busy:
            return False
        self._coming = self._begin()
        self._buffers.num_ahead += 1
        return True

    @property
    def has_come(self) -> bool:
        """Whether it was read ahead, and `read` takes no time and raises nothing."""
        return self._coming is not None and all(transfer.has_succeeded for transfer in self._coming[1])

    def _begin(self) -> tuple[Tensor, list[DiskTransfer]]:
        slot = self._buffers.slots.take(self.swapped.num_bytes)
        try:
            return slot, self.swapped.swap_in_to(slot, urgent=True)
        except BaseException:
            self._buffers.slots.give(slot, Event())
            raise

    def read(self) -> Tensor:
        """Return a slot (1D, bytes) that begins with the contents. The caller gives the slot back with `give`."""
        if self._coming is not None:
            (slot, reads), self._coming = self._coming, None
            self._buffers.num_ahead -= 1
        else:
            slot, reads = self._begin()
        begin = time.monotonic()
        try:
            for transfer in reads:
                transfer.wait()
            self._buffers.pace.note(max((one.seconds for one in reads), default=0.0), time.monotonic() - begin)
        except BaseException:
            self.give(slot, AllOf(reads))
            raise
        finally:
            self.swapped.swap_out(changed=False)
        return slot

    def give(self, slot: Tensor, after: Waitable) -> None:
        """Give a slot back, which is free after the event."""
        self._buffers.slots.give(slot, after)

    def forget(self) -> None:
        """Drop what was read ahead."""
        if self._coming is not None:
            (slot, reads), self._coming = self._coming, None
            self._buffers.num_ahead -= 1
            for transfer in reads:
                transfer.synchronize()
            self.swapped.swap_out(changed=False)
            self.give(slot, AllOf(reads))
