"""Pipelines in a search: how many micro-batches they get, which of them can be the fastest, and their plans.

A pipeline trains on as many rows in a step as the configuration says, or else as the fastest plan without one: more
micro-batches would make any bubble small. Matrix products at full speed and the bubble bound the time of a token from
below; a class whose bound is above the time of a plan is not simulated. Of the others, the first of each number of
tensor ranks that fit are found by simulations without time, and the two of them that then have the smallest bounds are
simulated in full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from shardwell.errors import ConfigError
from shardwell.memory import Tier
from shardwell.memory.machine import SimulatedMachine
from shardwell.memory.statistics import human
from shardwell.plan.candidates import REFUSED, Candidate, Dropped
from shardwell.plan.report import PlanReport
from shardwell.plan.speed import PlanSpeed, matmul_rate, passes_of_token, ranks_of_batch, tokens_of_rows
from shardwell.plan.structure import ACCUMULATION, MICRO, TRAIN, PlanClass

_FEWEST, _ENOUGH = 2, 4  # micro-batches for each stage: those that a pipeline has at least, and those that are aimed at
_TOKENS = 4096  # of a micro-batch: with so many, matrix products are near their full speed
_MOST_TIMED, _MOST_LOOKS = 2, 5
_SURELY = 1.1  # times the room that memory must be, if all of it were shared, for a class to be left out unseen
_COMES_AFTER = "a bound of its time comes after the plans that were simulated"

Shape = tuple[int, int]  # the rows of a micro-batch, and the micro-batches of a step


@dataclass
class PipeSearch:
    """The classes with pipelines of one search."""

    base: dict[str, Any]
    machine: SimulatedMachine
    sequence: int
    micro_batch: int | None  # None: is chosen
    plan: Callable[[PlanClass, dict[str, Any], bool], PlanReport]  # of a class; whether in full and with time
    num_parameters: int
    best: Candidate | None  # the fastest plan without a pipeline, if one fits
    dropped: list[Dropped] = field(default_factory=list)
    # of what had no room: ranks that share a block, whether it is recomputed, what it needed and what there is
    _lacks: list[tuple[int, bool, float, float]] = field(default_factory=list)

    def run(self, classes: list[PlanClass]) -> list[Candidate]:
        """Return the plans that fit and may be among the fastest."""
        if self.machine.speeds is None:
            for kind in classes:
                self._drop(kind, "without speeds its bubble is not known")
            return []
        found: list[tuple[PlanSpeed, PlanClass, PlanReport]] = []
        looks, seen = 0, set[int | None]()
        for kind, shapes in self._ordered(classes):
            if kind.tensor in seen or looks >= _MOST_LOOKS:
                self._drop(kind, _COMES_AFTER)
            elif (why := self._is_hopeless(kind)) is not None:
                self._drop(kind, why)
            else:
                looks += 1
                if (report := self._that_fits(kind, shapes)) is not None:
                    seen.add(kind.tensor)
                    found.append((self._speed(kind, report), kind, report))
        plans: list[Candidate] = []
        for bound, kind, report in sorted(found, key=lambda one: one[0]):
            fastest = min((one.speed for one in plans), default=None)
            if len(plans) >= _MOST_TIMED or (fastest is not None and fastest < bound):
                self._drop(kind, _COMES_AFTER)
            elif (full := self.plan(kind, report.config, True)).fits:
                plans.append(Candidate(kind, report.config[MICRO], full, self.sequence))
            else:
                self._drop(kind, full.lack())
        return plans

    def _is_hopeless(self, kind: PlanClass) -> str | None:
        """Return why a class is not looked at: states fill the device, and it shares them among too few ranks."""
        for ranks, recomputes, needed, room in self._lacks:
            if recomputes == kind.way.recomputes and needed * ranks > _SURELY * room * kind.rows_shared_by:
                return f"with {ranks} ranks that share a block's weights a pipeline needed {human(needed)} of a device"
        return None

    def _drop(self, kind: PlanClass, why: str) -> None:
        self.dropped.append(Dropped(kind, why))

    def _ordered(self, classes: list[PlanClass]) -> list[tuple[PlanClass, list[Shape]]]:
        """Return the classes that can be faster than the best plan, by their bounds."""
        found: list[tuple[float, int, PlanClass, list[Shape]]] = []
        limit = None if self.best is None else self.best.speed.seconds
        for kind in classes:
            try:
                shapes = self._shapes(kind)
            except ConfigError as error:
                self._drop(kind, f"the configuration{REFUSED}{error}")
                continue
            bound = self._bound(kind, shapes[0][1])
            if limit and bound >= limit:
                words = "its matrix products and its bubble alone take at least"
                self._drop(kind, f"{words} {bound / limit:.2f} times the time of a token")
            else:
                found.append((bound, kind.rows_shared_by, kind, shapes))
        found.sort(key=lambda one: one[:2])
        return [(kind, shapes) for _, _, kind, shapes in found]

    def _that_fits(self, kind: PlanClass, shapes: list[Shape]) -> PlanReport | None:
        why = ""
        for rows, number in shapes:
            try:
                found = self.plan(kind, self._config(kind, rows, number), False)
            except ConfigError as error:  # of what only an engine knows, such as its axes
                why = f"the engine{REFUSED}{error}"
                break
            if found.fits:
                return found
            why = f"with {number} micro-batches of {rows} {found.lack()}"
            needed, room = found.peak(Tier.DEVICE), found.device_room
            if (rows, number) == shapes[-1]:
                self._lacks.append((kind.rows_shared_by, kind.way.recomputes, needed, room))
        self._drop(kind, why)
        return None

    # ----------------------------------------------------------------------------------------------- micro-batches

    def _shapes(self, kind: PlanClass) -> list[Shape]:
        """Return the micro-batches that are tried, the first first; what is fixed stays so."""
        assert kind.pipe is not None
        if isinstance(train := self.base.get(TRAIN), int):
            return self._of_batch(kind, train)
        given = self.base.get(ACCUMULATION)
        if isinstance(given, int) and given > 1:
            return [(rows, given) for rows in ([self.micro_batch] if self.micro_batch else [4, 2, 1])]
        least, rows = _FEWEST * kind.pipe, self._rows_of_best(kind)
        largest = 1
        while 2 * largest * _ENOUGH * kind.pipe <= rows and 2 * largest * self.sequence <= _TOKENS:
            largest *= 2
        tried = [self.micro_batch] if self.micro_batch else list(dict.fromkeys([largest, 1]))
        return [(one, max(least, rows // one)) for one in tried]

    def _of_batch(self, kind: PlanClass, train: int) -> list[Shape]:
        sharing = max(1, self.machine.ranks.size // (ranks_of_batch(self.base) * kind.rows_shared_by))
        rows, rest = divmod(train, sharing)
        if rest:
            raise ConfigError(f"{TRAIN} is {train}, which {sharing} ranks cannot share evenly: use a multiple")
        if self.micro_batch is not None:
            if rows % self.micro_batch:
                raise ConfigError(
                    f"{TRAIN} is {train}: {rows} rows of a rank are no micro-batches of {self.micro_batch}"
                )
            return [(self.micro_batch, rows // self.micro_batch)]
        divisors = [one for one in range(1, rows + 1) if rows % one == 0]
        is_small = [one for one in divisors if one * self.sequence <= _TOKENS]
        enough = [one for one in is_small if rows // one >= _ENOUGH * (kind.pipe or 1)]
        return [(one, rows // one) for one in dict.fromkeys([max(enough, default=1), 1])]

    def _rows_of_best(self, kind: PlanClass) -> int:
        """Return the rows that a rank of a class trains on in a step as large as one of the best plan."""
        if self.best is None:
            return 1
        config, size = self.best.report.config, self.machine.ranks.size
        own = tokens_of_rows(config, size, self.sequence) // self.sequence
        return max(1, own * kind.rows_shared_by // ranks_of_batch(config))

    def _config(self, kind: PlanClass, rows: int, number: int) -> dict[str, Any]:
        if isinstance(self.base.get(TRAIN), int):
            base = {key: value for key, value in self.base.items() if key != ACCUMULATION}
        else:
            base = {**self.base, ACCUMULATION: number}
        return kind.config(base, rows)

    # -------------------------------------------------------------------------------------------------------- time

    def _bound(self, kind: PlanClass, number: int) -> float:
        """Return the seconds that a token takes a rank at least; 0 without speeds."""
        speeds = self.machine.speeds
        if speeds is None:
            return 0.0
        share = 1.0 if self.best is None else self.best.report.active_share
        each = passes_of_token(self.num_parameters, self.num_parameters, recomputes=kind.way.recomputes) * share
        return _with_bubble(kind, number) * each / matmul_rate(speeds, self.base)

    def _speed(self, kind: PlanClass, report: PlanReport) -> PlanSpeed:
        """Return a bound of the time of a class that was simulated without time."""
        found = PlanSpeed.of(replace(report, machine=self.machine), self.sequence, recomputes=kind.way.recomputes)
        rows = tokens_of_rows(report.config, self.machine.ranks.size, self.sequence) // self.sequence
        number = rows // report.config[MICRO]
        return replace(found, seconds=max(found.seconds, self._bound(kind, number)))


def _with_bubble(kind: PlanClass, number: int) -> float:
    """Return by how much a pipeline takes longer than its micro-batches: what a schedule without late weights takes."""
    assert kind.pipe is not None
    return (number + kind.pipe - 1) / number
