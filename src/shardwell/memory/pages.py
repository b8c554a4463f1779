"""Parameters that rest on disk pass through pinned memory on their way to the device.

    drive    | read 3 | read 4  | read 5  |
    bus               | copy 3  | copy 4  | copy 5  |
    device                      | use 3   | use 4   | use 5 |

A page is what rests; there are a few slots that pages are read into. Who will need a page soon says so ahead. The
device waits for them, and for nothing else that is read: they come first.
"""

from __future__ import annotations

from torch import Tensor

from shardwell.memory.chest import Chest
from shardwell.memory.device import All, Mark, Passing
from shardwell.memory.disk import DiskTier, Transfer
from shardwell.memory.mail import Aligned, Slots


class Pages:
    """The slots of an engine. All but one of them may hold pages that nobody needs yet."""

    def __init__(self, tier: DiskTier, memory: Aligned, num_slots: int) -> None:
        self.tier = tier
        self._most_ahead = max(1, num_slots - 1)
        self.slots = Slots(memory, self._most_ahead + 1, 0)
        self.num_ahead = 0  # pages that were asked for ahead and not used yet
        self.depth = 1  # units to ask for ahead

    @property
    def has_room(self) -> bool:
        return self.num_ahead < self._most_ahead

    def note_wait(self) -> None:
        """Somebody had to wait for a page that was asked for ahead: ask earlier from now on."""
        self.depth = min(self.depth + 1, self._most_ahead)


class Page:
    """One tensor on disk. Not for several threads at a time, but for the chest."""

    def __init__(self, pages: Pages, chest: Chest) -> None:
        self.chest = chest
        self._pages = pages
        self._coming: tuple[Tensor, list[Transfer]] | None = None

    def expect(self) -> None:
        """Begin to read it, if there is a slot to spare and nobody has to wait for what is still being written."""
        if self._coming is None and self._pages.has_room and not self.chest.is_busy:
            self._coming = self._begin()
            self._pages.num_ahead += 1

    def _begin(self) -> tuple[Tensor, list[Transfer]]:
        slot = self._pages.slots.take(self.chest.num_bytes)
        try:
            return slot, self.chest.fetch(slot, urgent=True)
        except BaseException:
            self._pages.slots.give(slot, Mark())
            raise

    def read(self) -> Tensor:
        """A slot (1D, bytes) that begins with what it holds; give that back."""
        if self._coming is not None:
            (slot, reads), self._coming = self._coming, None
            self._pages.num_ahead -= 1
            if not all(transfer.has_passed for transfer in reads):
                self._pages.note_wait()
        else:
            slot, reads = self._begin()
        try:
            for transfer in reads:
                transfer.wait()
        except BaseException:
            self.give(slot, All(reads))
            raise
        finally:
            self.chest.put_back(changed=False)
        return slot

    def give(self, slot: Tensor, after: Passing) -> None:
        """What was read is needed no more after the mark."""
        self._pages.slots.give(slot, after)

    def forget(self) -> None:
        """Nobody needs what was asked for ahead."""
        if self._coming is not None:
            (slot, reads), self._coming = self._coming, None
            self._pages.num_ahead -= 1
            for transfer in reads:
                transfer.synchronize()
            self.chest.put_back(changed=False)
            self.give(slot, All(reads))
