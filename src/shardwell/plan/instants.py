"""What a tier has at the instants of a step at which it may have its peak, and what it would have with more blocks.

A peak is the highest of many instants, each of which is a constant and an amount for each block. With few blocks
another one may be the highest than with all: the backward of the loss, and with more blocks the end of the backward,
when all gradients are there. So instants go on with the depth, and not peaks. Those of two depths are paired from the
beginning of a moment and from its end: between are blocks, which are mixtures of the first and the last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwell.memory import StateKind
from shardwell.plan.recording import ACTIVATIONS

_PLACES = {state: place for place, state in enumerate(StateKind)}
PARTS = (ACTIVATIONS, *(state.value for state in StateKind))


@dataclass(eq=False)
class Instants:
    """The bytes of a tier at each instant of a moment at which it may have its peak."""

    totals: list[int] = field(default_factory=list)
    activations: list[int] = field(default_factory=list)  # of the device, those of the totals
    states: list[tuple[int, ...]] = field(default_factory=list)  # the same: the others, by `StateKind`

    def peak(self) -> tuple[int, dict[str, int]]:
        """Return the most bytes, and on the device what they are of: the states, then activations."""
        most = max(self.totals)
        return most, {} if not self.states else _by_state(*self._row(self.totals.index(most)))

    def count_as(self, state: StateKind, size: int, since: int) -> None:
        """Count bytes as of a state that were counted as activations from an instant on."""
        for place in range(since, len(self.states)):
            self.activations[place] -= size
            self.states[place] = with_more(self.states[place], state, size)

    def rows(self) -> Any:
        """Return an array with a row for each instant: the parts, or the total where there are none."""
        if not self.states:
            return np.array(self.totals, dtype=np.int64)[:, None]
        return np.column_stack([np.array(one, dtype=np.int64) for one in (self.activations, self.states)])

    def _row(self, place: int) -> tuple[int, ...]:
        return self.activations[place], *self.states[place]


def with_more(states: tuple[int, ...], state: StateKind, size: int) -> tuple[int, ...]:
    """Return the bytes of all states with more, or fewer, of one."""
    found = list(states)
    found[_PLACES[state]] += size
    return tuple(found)


def _by_state(activations: int, *states: int) -> dict[str, int]:
    return dict(zip((*PARTS[1:], PARTS[0]), (*map(int, states), int(activations)), strict=True))


@dataclass(frozen=True)
class Lines:
    """The instants of a moment at one depth, and what each of them has more at another one."""

    rows: Any
    growth: Any
    head: int  # so many are counted from the beginning of the moment, the others from its end
    length: int  # of the moment at the first depth

    @classmethod
    def of(cls, first: Instants, second: Instants) -> Lines | None:
        """Return the lines of the instants of two depths; None if they are not the same ones.

        An instant of both depths has the same changes before it, or the same ones after it, of which few blocks near
        the other end have others. In the half that is near the sizes of changes may depend on the depth.
        """
        one, other = first.rows(), second.rows()
        first_changes, second_changes = np.diff(one, axis=0), np.diff(other, axis=0)
        head = 1 + _num_same(first_changes, second_changes, len(one) // 2)
        tail = 1 + _num_same(first_changes[::-1], second_changes[::-1], len(one) // 2)
        if len(other) < len(one) or head + tail < len(one):
            return None
        rows = np.concatenate([one[:head], one[len(one) - tail :]])
        paired = np.concatenate([other[:head], other[len(other) - tail :]])
        return cls(rows, paired - rows, head, len(one))

    def highest(self, times: int) -> tuple[int, int, dict[str, int]]:
        """Return the place, the bytes and the parts of the highest instant with so many times the growth."""
        rows = self.rows + times * self.growth
        totals = rows.sum(axis=1)
        place = int(totals.argmax())
        parts = {} if rows.shape[1] == 1 else _by_state(*rows[place])
        return place, int(totals[place]), parts

    def differs(self, third: Instants, place: int, times: int) -> int:
        """Return by how many bytes an instant of another depth is not what these lines say."""
        rows, expected = third.rows(), self.rows[place] + times * self.growth[place]
        if len(rows) < self.length:
            return int(expected.sum())
        found = rows[place if place < self.head else place - len(self.rows)]
        return int(np.abs(found - expected).max())


def _num_same(one: Any, other: Any, half: int) -> int:
    """Return how many of the first changes are the same: of equal signs in the half that is near, and beyond equal."""
    least = min(len(one), len(other))
    one, other = one[:least], other[:least]
    same = (one == other).all(axis=1)
    same[:half] |= (np.sign(one[:half]) == np.sign(other[:half])).all(axis=1)
    return least if same.all() else int(same.argmin())
