"""The order in which units were used in the last pass, to predict the next unit. A wrong prediction only costs time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shardwell.sharding import Unit


class ExecutionOrder:
    """The order of units in one direction (forward or backward)."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Start with `units`, the order to expect before a pass was seen."""
        self._next: dict[int, Unit] = {a.index: b for a, b in pairwise(units)}
        self.last: Unit | None = None
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
        if self.last is not None and self.last is not unit:
            self._next[self.last.index] = unit
        if self.last is not unit:
            self._seen.append(unit)
        self.last = unit
        return self._next.get(unit.index)

    def following(self, unit: Unit, num: int) -> list[Unit]:
        """Return up to `num` units that are expected after `unit`."""
        found: list[Unit] = []
        while len(found) < num and (after := self._next.get(unit.index)) is not None and after not in found:
            found.append(after)
            unit = after
        return found

    def elements_after(self, unit: Unit) -> int | None:
        """Return the elements of the units that followed `unit` in the last pass; None if it was not used then."""
        if unit not in self._before:
            return None
        return sum(later.numel for later in self._before[self._before.index(unit) + 1 :])
