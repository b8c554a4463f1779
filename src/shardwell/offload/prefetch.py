"""The links of the prefetch chain for parameters below the device: copies from host memory, and reads from disk.

Both are work that a rank does alone, so what they decide may depend on time and differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwell.offload.param_swap import ReadBuffers
from shardwell.runtime.prefetch import ExecutionOrder, PrefetchBudget
from shardwell.runtime.trace import TraceAction
from shardwell.sharding import Unit

Record = Callable[[TraceAction, Unit], None]


class HostToDeviceLink:
    """The link that copies a shard to the device ahead of its all-gather, while the unit before it is all-gathered."""

    distance = 2

    def __init__(self, room: PrefetchBudget, num_ranks: int, record: Record) -> None:
        self._room, self._num_ranks, self._record = room, num_ranks, record

    def start(self, expected: Unit | None, order: ExecutionOrder) -> None:
        """Start to copy the shard of the unit after `expected`, and drop copies that were wrong guesses."""
        if expected is None:
            return
        ahead = order.following(self.distance)
        for unit in self._room.units:
            if unit.is_on_device and unit not in ahead:
                unit.cancel_prefetch()
        if len(ahead) < self.distance:
            return
        if self._room.admits(ahead[-1], order, self._num_ranks) and ahead[-1].prefetch_to_device():
            self._record(TraceAction.HOST_TO_DEVICE, ahead[-1])

    def cancel(self) -> None:
        """Drop all copies that were not used."""
        for unit in self._room.units:
            unit.cancel_prefetch()


class DiskLink:
    """The link that reads shards from disk into staging buffers, as far ahead as the disk needs."""

    def __init__(self, buffers: ReadBuffers, room: PrefetchBudget, first: int, record: Record) -> None:
        """Create the link; `first` is the distance at which the next link of the chain needs what is read."""
        self._pace, self._room, self._first, self._record = buffers.pace, room, first, record
        self._order: ExecutionOrder | None = None  # of the running pass
        self._in_use: Unit | None = None

    @property
    def distance(self) -> int:
        """How many units ahead of the one in use the link works."""
        return self._first + self._pace.depth

    def start(self, expected: Unit | None, order: ExecutionOrder) -> None:
        """Start to read the units ahead, as many as there are buffers for."""
        if order is not self._order:
            self._pace.pause()  # the time between two passes is no time of use
        if order is not self._order or order.last is not self._in_use:
            self._pace.enter()
        self._order, self._in_use = order, order.last
        for unit in order.following(self.distance):
            if unit.prefetch_from_disk():
                self._record(TraceAction.DISK_READ, unit)

    def cancel(self) -> None:
        """Drop what was read and not used."""
        self._pace.pause()
        self._order = self._in_use = None
        for unit in self._room.units:
            unit.cancel_prefetch()


def offload_links(
    room: PrefetchBudget, num_ranks: int, buffers: ReadBuffers | None, record: Record
) -> list[HostToDeviceLink | DiskLink]:
    """Return the links for the tiers that the units are stored on; none if all are on the device."""
    links: list[HostToDeviceLink | DiskLink] = []
    if any(unit.can_prefetch_to_device for unit in room.units):
        links.append(HostToDeviceLink(room, num_ranks, record))
    if buffers is not None:
        links.append(DiskLink(buffers, room, 1 + len(links), record))
    return links
