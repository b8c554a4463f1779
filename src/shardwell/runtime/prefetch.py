"""Prefetch: which unit is expected next, whether its all-gather may start ahead of its use, and what comes before that.

Where parameters are stored below the device, `offload/` adds links that copy shards to the device and read them from
disk ahead of the all-gather. A wrong prediction only costs time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn

from shardwell.runtime.gather_turns import GatherTurns
from shardwell.sharding import Residency, Unit


@dataclass(frozen=True)
class PrefetchLimits:
    """Limits of what may be unsharded at the same time; sizes are in elements."""

    prefetches: bool
    live: int
    reuse_distance: int
    bucket: int = 0  # units after the next one are all-gathered ahead, too, if all of them together are no larger
    most_ahead: int = 1  # units that are all-gathered ahead
    bounds_forward: bool = True  # by the bucket; else only a backward, and a forward that is not trained


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


class PrefetchBudget:
    """Decides whether a unit may be on the device ahead of its use; all ranks decide alike."""

    def __init__(self, limits: PrefetchLimits, num_ranks: int) -> None:
        self._limits, self._num_ranks = limits, num_ranks
        self.units: Sequence[Unit] = ()
        self._total = 0  # elements of all units

    def adopt_units(self, units: Sequence[Unit]) -> None:
        """Count these units from now on."""
        self.units = units
        self._total = sum(unit.numel for unit in units)

    def may_prefetch(self, unit: Unit, order: ExecutionOrder) -> bool:
        """Return whether to start the all-gather of a unit ahead of its use.

        It is not started before an update: waiting for that here would delay work that can already run.
        """
        may_wait = unit.updates.is_awaited if self._num_ranks > 1 else not unit.is_up_to_date
        return unit.residency is Residency.SHARDED and not may_wait and self.admits(unit, order)

    def admits(self, unit: Unit, order: ExecutionOrder, num_parts: int = 1) -> bool:
        """Return whether there is room for a sharded unit, or for one of `num_parts` equal parts of it."""
        if order.is_backward and isinstance(unit.spec.module, nn.Embedding):
            return False  # nothing in its backward waits for its values: prefetch would only take memory
        if not self._limits.prefetches or self._total <= self._limits.live:
            return self._limits.prefetches
        live = 0  # elements of units that are unsharded or being unsharded
        for other in self.units:
            if other.residency is not Residency.SHARDED:
                live += other.numel
        return live + unit.numel // num_parts <= self._limits.live


class Prefetch:
    """The prefetch of one engine: the expected orders of units, and what may be started ahead of them."""

    forward: ExecutionOrder
    backward: ExecutionOrder

    def __init__(self, limits: PrefetchLimits, num_ranks: int) -> None:
        self.limits = limits
        self.budget = PrefetchBudget(limits, num_ranks)
        self.gathers: type[Unit] | GatherTurns = Unit  # who starts all-gathers
        self.links: list[PrefetchLink] = []  # bring shards below the device to it, ahead of their all-gathers

    def units_to_start(self, expected: Unit | None, order: ExecutionOrder) -> Iterator[Unit]:
        """Yield the units whose all-gathers are to be started ahead, `expected` first.

        Each must be started before the next one is asked for: what is unsharded then is counted.
        """
        if expected is None or self.limits.most_ahead == 1:
            if expected is not None and self.budget.may_prefetch(expected, order):
                yield expected
            return
        numel = 0
        for unit in order.following(self.limits.most_ahead):
            numel += unit.numel
            if unit is not expected and numel > self.limits.bucket and not self._is_free(unit, order):
                return
            if unit.residency is Residency.SHARDED:
                if not self.budget.may_prefetch(unit, order):
                    return  # what comes later must not take the room of what comes first
                yield unit

    def _is_free(self, unit: Unit, order: ExecutionOrder) -> bool:
        """Return whether to gather one more unit ahead takes no memory that the step does not need anyway.

        The gradients of a unit take as much in the backward as its parameters do here.
        """
        is_bound = self.limits.bounds_forward or order.is_backward or not torch.is_grad_enabled()
        return not is_bound and len(unit.trainable) == len(unit.groups)

    def adopt_units(self, units: Sequence[Unit], resharding: Sequence[Unit]) -> None:
        """Expect these units from now on; those in `resharding` are all-gathered, in the order of their modules."""
        self.forward = ExecutionOrder(resharding)
        root = [unit for unit in resharding if not unit.name]  # its outputs are the model's: it comes first
        self.backward = ExecutionOrder(root + [unit for unit in resharding[::-1] if unit.name], is_backward=True)
        self.budget.adopt_units(units)
