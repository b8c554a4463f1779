"""Prefetch: which unit is expected next, and the chain of links that start its way to the device ahead of its use.

The chain always has the link that starts all-gathers. Where parameters are stored below the device, `offload/` adds
links that copy shards to the device and read them from disk. A wrong prediction only costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from torch import nn

from shardwell.sharding import Residency, Unit


@dataclass(frozen=True)
class PrefetchLimits:
    """Limits of what may be unsharded at the same time; sizes are in elements."""

    prefetches: bool
    live: int
    reuse_distance: int


class ExecutionOrder:
    """The order in which units were used in the last pass in one direction, to predict the next unit."""

    def __init__(self, units: Sequence[Unit], *, is_backward: bool = False) -> None:
        """Start with `units`, the order to expect before a pass was seen."""
        self.is_backward = is_backward
        self.last: Unit | None = None
        self._next: dict[int, Unit] = {a.index: b for a, b in pairwise(units)}
        self._seen: list[Unit] = []
        self._before: list[Unit] = []  # all units of the last pass

    def start(self) -> None:
        """Begin a new pass."""
        if self._seen:
            self._before = self._seen
            self._next.pop(self._seen[-1].index, None)  # no unit came after it
        self._seen, self.last = [], None

    def visit(self, unit: Unit) -> Unit | None:
        """Record that `unit` is used now; return the unit that is expected after it."""
        if self.last is not unit:
            if self.last is not None:
                self._next[self.last.index] = unit
            self._seen.append(unit)
            self.last = unit
        return self._next.get(unit.index)

    def following(self, num: int) -> list[Unit]:
        """Return up to `num` units that are expected after the one that was visited last."""
        found: list[Unit] = []
        unit = self.last
        while unit is not None and len(found) < num:
            unit = self._next.get(unit.index)
            if unit is None or unit in found:
                break
            found.append(unit)
        return found

    def elements_after(self, unit: Unit) -> int | None:
        """Return the elements of the units that followed `unit` in the last pass; None if it was not used then."""
        if unit not in self._before:
            return None
        return sum(later.numel for later in self._before[self._before.index(unit) + 1 :])


class PrefetchLink(Protocol):
    """One link of the chain. Each works a number of units ahead of the unit in use, and starts what is not started."""

    @property
    def distance(self) -> int:
        """How many units ahead of the one in use the link works."""

    def start(self, expected: Unit | None, order: ExecutionOrder) -> None:
        """Start work for the units ahead, `expected` first; none may be. It may be called repeatedly for one unit."""

    def cancel(self) -> None:
        """Drop what was started and not used, because a pass begins or ends."""


class DeviceRoom:
    """Decides whether a unit may be on the device ahead of its use; all ranks decide alike."""

    def __init__(self, limits: PrefetchLimits) -> None:
        self._limits = limits
        self.units: Sequence[Unit] = ()
        self._total = 0  # elements of all units

    def adopt_units(self, units: Sequence[Unit]) -> None:
        """Count these units from now on."""
        self.units = units
        self._total = sum(unit.numel for unit in units)

    def admits(self, unit: Unit, order: ExecutionOrder, num_parts: int = 1) -> bool:
        """Return whether there is room for a sharded unit, or for one of `num_parts` equal parts of it."""
        if order.is_backward and isinstance(unit.module, nn.Embedding):
            return False  # nothing in its backward waits for its values: prefetch would only take memory
        if not self._limits.prefetches or self._total <= self._limits.live:
            return self._limits.prefetches
        live = 0  # elements of units that are unsharded or being unsharded
        for other in self.units:
            if other.residency is not Residency.SHARDED:
                live += other.numel
        return live + unit.numel // num_parts <= self._limits.live


class AllGatherLink:
    """The link that starts the all-gather of the next unit while the one in use computes."""

    distance = 1

    def __init__(self, room: DeviceRoom, num_ranks: int, unshard: Callable[[Unit], None]) -> None:
        """Create the link; `unshard` starts the all-gather of a unit."""
        self._room, self._num_ranks, self._unshard = room, num_ranks, unshard

    def start(self, expected: Unit | None, order: ExecutionOrder) -> None:
        """Start the all-gather, unless an update comes first: waiting here would delay work that can already run."""
        if expected is None:
            return
        may_wait = expected.awaits_update if self._num_ranks > 1 else not expected.is_up_to_date
        if expected.residency is Residency.SHARDED and not may_wait and self._room.admits(expected, order):
            self._unshard(expected)

    def cancel(self) -> None:
        """Do nothing: an all-gather that was started is finished, because it is the same on all ranks."""
