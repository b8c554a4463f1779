"""`--auto`: the fastest plan that fits, those that come next, and why the others were dropped.

Classes of plans (`structure.py`) are dropped where the configuration refuses them, where states alone have no room,
where another class with less memory had none, and where states need not leave the device. Each class that is left is
simulated with a micro-batch of one, at two depths, and one of them with two: what a sequence adds to a peak is the same
in all, so that the largest micro-batch is a division. A bound from below orders the classes (`speed.py`). The first
ones are simulated in full, with time, at their largest micro-batch, until no bound is below the fastest.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardwell.config import load
from shardwell.errors import ConfigError, ShardwellError
from shardwell.memory import Tier
from shardwell.memory.machine import SimulatedMachine
from shardwell.memory.statistics import human
from shardwell.plan.axes import ranks_along
from shardwell.plan.largest import MOST, PeakLines, confirmed
from shardwell.plan.models import PlanModel
from shardwell.plan.report import PlanReport
from shardwell.plan.speed import ALIKE, WORTH_IT, PlanSpeed, compared, ranks_of_batch
from shardwell.plan.structure import ACCUMULATION, MICRO, TRAIN, PlanClass, as_text, minimal, structure_classes
from shardwell.plan.time_report import time_sentence
from shardwell.runtime.precision import mixed_dtype
from shardwell.sharding import wrap_model
from shardwell.sharding.ways import states_of
from shardwell.sharding.wrap import LeafRules

if TYPE_CHECKING:
    from collections.abc import Iterator


_FEWEST, _MOST_TIMED = 3, 4  # classes that are simulated in full: the first one and those that come next
_BATCH = (MICRO, TRAIN, ACCUMULATION)
_ADAM = ("adam", "adamw")
_NO_ZEROPP = "without ZeRO++ it takes less memory, and has no room"
_TOO_DEEP = "states further up have room"


@dataclass(frozen=True)
class Candidate:
    """A class with a micro-batch, and its plan."""

    kind: PlanClass
    micro_batch: int
    report: PlanReport
    sequence: int

    @property
    def speed(self) -> PlanSpeed:
        """What orders it among others."""
        return PlanSpeed.of(self.report, self.sequence, recomputes=self.kind.way.recomputes)

    def __str__(self) -> str:
        return f"{self.kind}, micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class Dropped:
    """A class that is not among the plans, and the reason."""

    kind: PlanClass
    why: str


@dataclass(frozen=True)
class AutoPlan:
    """The fastest plan that fits, if one does, those that come next, and what was dropped."""

    plans: list[Candidate]  # the fastest first
    dropped: list[Dropped]
    base: dict[str, Any]
    num_simulated: int = 0

    @property
    def best(self) -> Candidate | None:
        """The fastest plan; None if nothing fits."""
        return self.plans[0] if self.plans else None

    def config(self) -> dict[str, Any]:
        """Return the configuration of the fastest plan, without keys that have their defaults."""
        if self.best is None:
            raise ShardwellError("no plan fits, so there is no configuration of one")
        return minimal(self.best.report.config, self.best.report.num_ranks)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as values of JSON."""
        found: dict[str, Any] = {"fits": self.best is not None, "simulated": self.num_simulated}
        if self.best is not None:
            found["plan"] = {"words": str(self.best), **self.best.report.as_dict()}
            found["config"] = self.config()
            found["recompute"] = self.best.kind.way.recomputes
            found["runners_up"] = [
                {"words": str(one), "why": why, "config": minimal(one.report.config, one.report.num_ranks)}
                for one, why in self.reasons()
            ]
        found["dropped"] = [{"words": str(one.kind), "why": one.why} for one in self.dropped]
        return found

    def __str__(self) -> str:
        if self.best is None:
            return "\n".join(["Nothing that was tried fits.", *self._dropped_in_words()])
        found, num_ranks = self.best.report, self.best.report.num_ranks
        lines = [f"The fastest plan of {found.name} on {num_ranks:,} GPUs: {self.best}. {found.sentence()}"]
        lines += [] if found.time is None else [time_sentence(found.time)]
        if next_ones := self.reasons():
            lines.append("Next:")
            lines += [f"  {one}: {why}" for one, why in next_ones]
        lines += self._dropped_in_words()
        if self.best.kind.way.recomputes:
            lines.append(
                "Recompute blocks in the model: model.gradient_checkpointing_enable(), or shardwell.checkpointing."
            )
        return "\n".join([*lines, "Its configuration:", as_text(self.config())])

    def _dropped_in_words(self) -> list[str]:
        by_reason: dict[str, list[str]] = {}
        for one in self.dropped:
            by_reason.setdefault(one.why, []).append(str(one.kind))
        return [
            f"Dropped: {kinds[0]}{f' and {len(kinds) - 1} more' if len(kinds) > 1 else ''}: {why}."
            for why, kinds in by_reason.items()
        ]

    def reasons(self) -> list[tuple[Candidate, str]]:
        """Return the plans that come next, each with the reason why it is not the first."""
        assert self.best is not None
        return [(one, compared(one.speed, self.best.speed)) for one in self.plans[1:]]


@dataclass
class Search:
    """One search: a model, a configuration that is kept but for what is chosen, and a machine."""

    model: PlanModel
    base: dict[str, Any]
    machine: SimulatedMachine
    sequence: int
    recomputes: bool | None = None  # None: both are tried
    micro_batch: int | None = None  # None: the largest
    has_disk: bool = False
    _found: list[tuple[PlanClass, PeakLines | PlanReport]] = field(default_factory=list)
    _dropped: list[Dropped] = field(default_factory=list)
    # of peaks with a sequence, by whether blocks are recomputed, and by tensor ranks
    _growth: dict[tuple[bool, int | None], dict[str, int]] = field(default_factory=dict)
    _num_simulated: int = 0

    def run(self) -> AutoPlan:
        """Return the plans that fit, the fastest first."""
        tried = self.recomputes if self.model.has_choices else False
        accumulation = int(self.base.get(ACCUMULATION, 1) or 1)
        has_axes = any(ranks_along(self.base, axis) > 1 for axis in ("tensor", "pipe", "sequence", "expert"))
        has_tensor = self.model.has_choices and not has_axes
        classes = structure_classes(
            self.machine,
            accumulation,
            tried,
            has_disk=self.has_disk,
            has_tensor=has_tensor,
        )
        self._check_batch(classes)
        with _quiet():
            self._bound_states(classes)
            self._simulate(classes)
            plans = self._timed()
        plans.sort(key=lambda one: one.speed)
        return AutoPlan(_simplest_first(plans), self._dropped, self.base, self._num_simulated)

    def _check_batch(self, classes: list[PlanClass]) -> None:
        """Raise if the ranks cannot share the batch in any class."""
        errors = []
        for tensor in dict.fromkeys(one.tensor for one in classes):
            try:
                self._per_rank(tensor)
            except ConfigError as error:
                errors.append(error)
            else:
                return
        raise errors[0]

    # ------------------------------------------------------------------------------------------- what is dropped

    def _bound_states(self, classes: list[PlanClass]) -> None:
        """Drop classes that the configuration refuses, and those whose states alone have no room."""
        size, room = self.machine.ranks.size, PlanReport.room_of(self.machine)
        loaded = load({key: value for key, value in self.base.items() if key not in _BATCH})
        kind, mixed = "" if loaded.optimizer is None else loaded.optimizer.type.lower(), mixed_dtype(loaded)
        specs = wrap_model(self.model.whole(), LeafRules())
        for one in list(classes):
            why = self._refusal(one)
            if why is None and room is not None:
                states = states_of(specs, one.way.stage, size, mixed, False, 2 if kind in _ADAM else 0)
                least = states.stored_bytes(dict.fromkeys(states.units, one.way.place))[Tier.DEVICE] // (
                    one.tensor or 1
                )
                if least > room:
                    why = f"states alone take {human(least)} of a device, and {human(room)} may be used"
            if why is not None:
                self._dropped.append(Dropped(one, why))
                classes.remove(one)

    def _refusal(self, kind: PlanClass) -> str | None:
        try:
            load(self._config(kind, 1), world_size=self.machine.ranks.size)
        except ConfigError as error:
            return f"the configuration refuses it: {error}"
        return None

    # ------------------------------------------------------------------------------------------ what is simulated

    def _simulate(self, classes: list[PlanClass]) -> None:
        """Simulate classes level by level, down to the one below the first that fits."""
        fits: set[PlanClass] = set()
        last: int | None = None  # the deepest level that is looked at
        for kind in classes:
            below = -1 if last is None else kind.depth - last
            if below > 0 or (below == 0 and not self._is_worth_a_look(kind)):
                self._dropped.append(Dropped(kind, _TOO_DEEP))
            elif not kind.is_plain and kind.plain() not in fits:
                self._dropped.append(Dropped(kind, _NO_ZEROPP))
            elif self._look_at(kind):
                fits.add(kind)
                last = kind.depth + 1 if last is None else last

    def _is_worth_a_look(self, kind: PlanClass) -> bool:
        """Return whether a class is compared though states further up have room: the one with the largest batch."""
        recomputes = self.recomputes if self.recomputes is not None else self.model.has_choices
        return kind.is_plain and kind.way.recomputes == recomputes and kind.way.stage in (0, 3)

    def _look_at(self, kind: PlanClass) -> bool:
        """Simulate a class; return whether it fits with the smallest micro-batch."""
        sizes = self._micro_batches(kind)
        try:
            one = self._plan(kind, sizes[0], verified=False)
            if one.costs.kept and not one.fits:
                kind = replace(kind, keeps=False)
                one = self._plan(kind, sizes[0], verified=False)
        except ConfigError as error:  # of what only an engine knows, such as its axes
            self._dropped.append(Dropped(kind, f"the engine refuses it: {error}"))
            return False
        if not one.fits:
            self._dropped.append(Dropped(kind, f"with a micro-batch of {sizes[0]} {one.lack()}"))
            return False
        if len(sizes) == 1:
            self._found.append((kind, one))
            return True
        again = kind.way.recomputes, kind.tensor
        if again not in self._growth:
            other = self._plan(kind, sizes[1], verified=False)
            between = sizes[1] - sizes[0]
            self._growth[again] = {
                key: (size - one.costs.peaks[key]) // between for key, size in other.costs.peaks.items()
            }
        peaks = {key: size + self._growth[again].get(key, 0) for key, size in one.costs.peaks.items()}
        larger = replace(one, costs=replace(one.costs, peaks=peaks))
        self._found.append((kind, PeakLines((sizes[0], sizes[0] + 1), (one, larger))))
        return True

    def _micro_batches(self, kind: PlanClass) -> list[int]:
        """Return the micro-batches that may be chosen, all of them or the first two of many."""
        if self.micro_batch is not None or not self.model.has_batches:
            return [self.micro_batch or int(self.base.get(MICRO, 1) or 1)]
        per_rank = self._per_rank(kind.tensor)
        return [1, 2] if per_rank is None else [one for one in range(1, per_rank + 1) if per_rank % one == 0]

    def _per_rank(self, tensor: int | None = None) -> int | None:
        """Return the sequences of each rank in a step if the configuration says how many all ranks have.

        `tensor`: the ranks that share them along a tensor axis of a class.
        """
        train = self.base.get(TRAIN)
        if not isinstance(train, int):
            return None
        sharing = max(1, self.machine.ranks.size // (ranks_of_batch(self.base) * (tensor or 1)))
        if train % sharing:
            raise ConfigError(f"{TRAIN} is {train}, which {sharing} ranks cannot share evenly: use a multiple")
        return train // sharing

    def _config(self, kind: PlanClass, micro_batch: int) -> dict[str, Any]:
        base = self.base
        if (per_rank := self._per_rank(kind.tensor)) is not None:
            base = {key: value for key, value in base.items() if key != ACCUMULATION}
            assert per_rank % micro_batch == 0
        return kind.config(base, micro_batch)

    def _plan(self, kind: PlanClass, micro_batch: int, *, verified: bool = True) -> PlanReport:
        """Simulate a class in full and with time, or without being `verified`."""
        self._num_simulated += 1
        config, machine = self._config(kind, micro_batch), self.machine
        quick = machine if verified else replace(machine, speeds=None)
        return self.model.report(config, quick, self.sequence, kind.way.recomputes, verified=verified)

    # ------------------------------------------------------------------------------------------ what is confirmed

    def _timed(self) -> list[Candidate]:
        """Return the first classes of the order, simulated in full, until no bound is below the fastest."""
        order = sorted(((self._guess(pair).speed, *pair) for pair in self._found), key=lambda one: one[0])
        plans: list[Candidate] = []
        for bound, kind, found in order:
            fastest = min((one.speed for one in plans), default=None)
            is_over = fastest is not None and fastest < bound and len(plans) >= _FEWEST
            if is_over or len(plans) >= _MOST_TIMED:
                self._dropped.append(Dropped(kind, "a bound of its time comes after the plans that were simulated"))
            elif (plan := self._confirm(kind, found)) is not None:
                plans.append(plan)
        return plans

    def _guess(self, pair: tuple[PlanClass, PeakLines | PlanReport]) -> Candidate:
        """Return what the largest micro-batch would be like, from the simulations so far."""
        kind, found = pair
        if isinstance(found, PlanReport):
            return Candidate(kind, found.config[MICRO], replace(found, machine=self.machine), self.sequence)
        number = self._allowed(found.largest(), kind)
        first = replace(found.reports[0], machine=self.machine)  # with speeds; what moves is the same in any batch
        report = replace(first, config=self._config(kind, number))
        return Candidate(kind, number, report, self.sequence)

    def _allowed(self, number: int, kind: PlanClass) -> int:
        """Return the largest micro-batch up to a number that may be chosen."""
        if self._per_rank(kind.tensor) is None:
            return min(number, MOST)
        return max(one for one in self._micro_batches(kind) if one <= max(1, number))

    def _confirm(self, kind: PlanClass, found: PeakLines | PlanReport) -> Candidate | None:
        def plan(number: int) -> PlanReport:
            return self._plan(kind, number)

        if isinstance(found, PlanReport):
            number, report = found.config[MICRO], plan(found.config[MICRO])
        elif self._per_rank(kind.tensor) is None:
            number, report = confirmed(plan, found, MOST)
        else:
            numbers = [one for one in reversed(self._micro_batches(kind)) if one <= max(1, found.largest())]
            number, report = next(((one, made) for one in numbers if (made := plan(one)).fits), (1, found.reports[0]))
        if isinstance(found, PeakLines) and report is found.reports[0]:  # which was not simulated in full
            report = plan(number)
        if not report.fits:
            self._dropped.append(Dropped(kind, f"with a micro-batch of {number} {report.lack()}"))
            return None
        return Candidate(kind, number, report, self.sequence)


def _simplest_first(plans: list[Candidate]) -> list[Candidate]:
    """Return the plans with the simplest of the fastest first.

    Quantised collectives must save a tenth of the time to come before exact ones. Less than `ALIKE` of a difference is
    below what a simulation can tell, and so decides nothing.
    """
    if not plans:
        return plans
    exact = next((one for one in plans if not one.kind.quantised), None)
    first = plans[0]
    if exact is not None and first.kind.quantised and first.speed.cost >= WORTH_IT * exact.speed.cost:
        first = exact
    near = [one for one in plans if one.speed.cost <= ALIKE * first.speed.cost]
    alike = [one for one in near if first.kind.quantised or not one.kind.quantised]
    first = min(
        alike, key=lambda one: (one.kind.depth, one.kind.quantised, one.kind.tensor or 1, one.kind.hpz, one.speed)
    )
    return [first, *(one for one in plans if one is not first)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the notes of many simulated engines out of the log."""
    log = logging.getLogger("shardwell")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
