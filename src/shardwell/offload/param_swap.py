"""Parameters that rest on disk pass through pinned memory on their way to the device.

    drive    | read 4 | read 5  | read 6  |
    bus               | lift 4  | lift 5  | lift 6   |
    links                       | gather 4 | gather 5 | gather 6 |
    device                                 | use 4    | use 5    | use 6 |

A page is what rests; there are a few slots that pages are read into. Who will need a page soon says so ahead. The
device waits for them, and for nothing else that is read: they come first. A rank that is alone gathers straight from a
slot: there is nothing to do beside the copy.
"""

from __future__ import annotations

import math
import time

from torch import Tensor

from shardwell.memory.device import AllOf, Event, Waitable
from shardwell.offload.disk import DiskTier, DiskTransfer
from shardwell.offload.staging import AlignedAllocator, StagingPool
from shardwell.offload.swapped_tensors import SwappedTensors

_MEMORY = 8  # units and pages back that a pace remembers


class ReadAheadDepth:
    """How many units ahead a page is asked for: as many as are used while it comes.

    What units wait for pages is no time of use. So where the drives are what everybody waits for, they are asked as
    early as slots allow.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._unit = 0.0  # seconds that a unit is used, on average
        self._page = 0.0  # seconds until a page has come, the longest of late
        self._since: float | None = None  # when the unit that is used came

    @property
    def depth(self) -> int:
        return min(self._most, max(1, math.ceil(self._page / self._unit))) if self._unit else 1

    def enter(self) -> None:
        """The next unit is used from now on."""
        now = time.monotonic()
        if self._since is not None:
            used = max(0.0, now - self._since)
            self._unit += (used - self._unit) / _MEMORY if self._unit else used
        self._since = now

    def pause(self) -> None:
        """No unit is used for a while."""
        self._since = None

    def note(self, seconds: float, waited: float) -> None:
        """A page has come, so long after it was asked for; so much of that somebody waited for it."""
        self._page = max(seconds, self._page * (1 - 1 / _MEMORY))
        if self._since is not None:
            self._since += waited


class ReadBuffers:
    """The slots of an engine. All but one of them may hold pages that nobody needs yet."""

    def __init__(self, tier: DiskTier, memory: AlignedAllocator, num_slots: int) -> None:
        self.tier = tier
        self._most_ahead = max(1, num_slots - 1)
        self.slots = StagingPool(memory, self._most_ahead + 1, 0)
        self.num_ahead = 0  # pages that were asked for ahead and not used yet
        self.pace = ReadAheadDepth(self._most_ahead)

    @property
    def has_room(self) -> bool:
        return self.num_ahead < self._most_ahead


class SwappedShard:
    """One tensor on disk. Not for several threads at a time, but for the chest."""

    def __init__(self, pages: ReadBuffers, chest: SwappedTensors) -> None:
        self.chest = chest
        self._pages = pages
        self._coming: tuple[Tensor, list[DiskTransfer]] | None = None

    def expect(self) -> bool:
        """Begin to read it, if there is a slot to spare and nobody has to wait for what is still being written."""
        if self._coming is not None or not self._pages.has_room or self.chest.is_busy:
            return False
        self._coming = self._begin()
        self._pages.num_ahead += 1
        return True

    @property
    def has_come(self) -> bool:
        """It was asked for ahead, and to read it takes no time and raises nothing."""
        return self._coming is not None and all(transfer.has_succeeded for transfer in self._coming[1])

    def _begin(self) -> tuple[Tensor, list[DiskTransfer]]:
        slot = self._pages.slots.take(self.chest.num_bytes)
        try:
            return slot, self.chest.swap_in_to(slot, urgent=True)
        except BaseException:
            self._pages.slots.give(slot, Event())
            raise

    def read(self) -> Tensor:
        """A slot (1D, bytes) that begins with what it holds; give that back."""
        if self._coming is not None:
            (slot, reads), self._coming = self._coming, None
            self._pages.num_ahead -= 1
        else:
            slot, reads = self._begin()
        begin = time.monotonic()
        try:
            for transfer in reads:
                transfer.wait()
            self._pages.pace.note(max((one.seconds for one in reads), default=0.0), time.monotonic() - begin)
        except BaseException:
            self.give(slot, AllOf(reads))
            raise
        finally:
            self.chest.swap_out(changed=False)
        return slot

    def give(self, slot: Tensor, after: Waitable) -> None:
        """What was read is needed no more after the mark."""
        self._pages.slots.give(slot, after)

    def forget(self) -> None:
        """Nobody needs what was asked for ahead."""
        if self._coming is not None:
            (slot, reads), self._coming = self._coming, None
            self._pages.num_ahead -= 1
            for transfer in reads:
                transfer.synchronize()
            self.chest.swap_out(changed=False)
            self.give(slot, AllOf(reads))
