"""`--auto`: the fastest plan that fits, those that come next, and why the others were dropped.

Classes of plans (`structure.py`) are dropped where the configuration refuses them, where states alone have no room,
where another class with less memory had none, and where states need not leave the device. Each class that is left is
simulated with a micro-batch of one, at two depths, and one of them with two: what a sequence adds to a peak is the same
in all, so that the largest micro-batch is a division. A bound from below orders the classes (`speed.py`). The first
ones are simulated in full, with time, at their largest micro-batch, until no bound is below the fastest. Then come
pipelines (`pipe_search.py`).
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwell.config import load
from shardwell.errors import ConfigError
from shardwell.memory import Tier
from shardwell.memory.machine import SimulatedMachine
from shardwell.memory.statistics import human
from shardwell.plan.axes import ranks_along
from shardwell.plan.candidates import REFUSED, AutoPlan, Candidate, Dropped, simplest_first
from shardwell.plan.largest import MOST, PeakLines, confirmed
from shardwell.plan.models import PlanModel
from shardwell.plan.pipe_search import PipeSearch
from shardwell.plan.report import PlanReport
from shardwell.plan.simulation import BlockModel
from shardwell.plan.speed import ranks_of_batch
from shardwell.plan.structure import ACCUMULATION, MICRO, TRAIN, PlanClass, structure_classes
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
_NO_SEQUENCE = "with fewer ranks along the sequence it has room, and moves less"


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
    # of peaks with a sequence, by whether blocks are recomputed, and by tensor and sequence ranks
    _growth: dict[tuple[bool, int | None, int | None], dict[str, int]] = field(default_factory=dict)
    _num_simulated: int = 0

    def run(self) -> AutoPlan:
        """Return the plans that fit, the fastest first."""
        tried = self.recomputes if self.model.has_choices else False
        accumulation = int(self.base.get(ACCUMULATION, 1) or 1)
        has_axes = any(ranks_along(self.base, axis) > 1 for axis in ("tensor", "pipe", "sequence", "expert"))
        block = self.model.make(1, 1, False)
        classes = structure_classes(
            self.machine,
            accumulation,
            tried,
            has_disk=self.has_disk,
            has_axes=self.model.has_choices and not has_axes,
            layers=block.layers if isinstance(block, BlockModel) and block.hidden else 0,
        )
        self._check_batch(classes)
        with _quiet():
            whole = self.model.whole()
            self._bound_states(whole, classes)
            self._simulate([one for one in classes if one.pipe is None])
            plans = self._timed()
            plans += self._pipelines([one for one in classes if one.pipe is not None], plans, whole)
        plans.sort(key=lambda one: one.speed)
        return AutoPlan(simplest_first(plans), self._dropped, self.base, self._num_simulated)

    def _pipelines(self, classes: list[PlanClass], plans: list[Candidate], whole: nn.Module) -> list[Candidate]:
        """Return the plans of pipelines, with the best of others to compare with."""

        def plan(kind: PlanClass, config: dict[str, Any], verified: bool) -> PlanReport:
            self._num_simulated += 1
            machine = self.machine if verified else replace(self.machine, speeds=None)
            return self.model.report(config, machine, self.sequence, kind.way.recomputes, verified=verified)

        best = min(plans, key=lambda one: one.speed, default=None)
        size = sum(one.numel() for one in whole.parameters())
        base, machine, number = self.base, self.machine, self.micro_batch
        return PipeSearch(base, machine, self.sequence, number, plan, size, best, self._dropped).run(classes)

    def _check_batch(self, classes: list[PlanClass]) -> None:
        """Raise if the ranks cannot share the batch in any class."""
        errors = []
        for kind in {one.rows_shared_by: one for one in classes}.values():
            try:
                self._per_rank(kind)
            except ConfigError as error:
                errors.append((kind.rows_shared_by, error))
            else:
                return
        raise min(errors, key=lambda one: one[0])[1]

    # ------------------------------------------------------------------------------------------- what is dropped

    def _bound_states(self, whole: nn.Module, classes: list[PlanClass]) -> None:
        """Drop classes that the configuration refuses, and those whose states alone have no room."""
        size, room = self.machine.ranks.size, PlanReport.room_of(self.machine)
        loaded = load({key: value for key, value in self.base.items() if key not in _BATCH})
        kind, mixed = "" if loaded.optimizer is None else loaded.optimizer.type.lower(), mixed_dtype(loaded)
        specs = wrap_model(whole, LeafRules())
        for one in list(classes):
            why = self._refusal(one) if one.pipe is None else None  # whose micro-batches are not known yet
            if why is None and room is not None:
                states = states_of(specs, one.way.stage, size, mixed, False, 2 if kind in _ADAM else 0)
                least = states.stored_bytes(dict.fromkeys(states.units, one.way.place))[Tier.DEVICE]
                least //= (one.tensor or 1) * (one.pipe or 1)
                if least > room:
                    why = f"states alone take {human(least)} of a device, and {human(room)} may be used"
            if why is not None:
                self._dropped.append(Dropped(one, why))
                classes.remove(one)

    def _refusal(self, kind: PlanClass) -> str | None:
        try:
            load(self._config(kind, 1), world_size=self.machine.ranks.size)
        except ConfigError as error:
            return f"the configuration{REFUSED}{error}"
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
            elif kind.sequence is not None and any(_is_with_less(one, kind) for one in fits):
                self._dropped.append(Dropped(kind, _NO_SEQUENCE))
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
            self._dropped.append(Dropped(kind, f"the engine{REFUSED}{error}"))
            return False
        if not one.fits:
            self._dropped.append(Dropped(kind, f"with a micro-batch of {sizes[0]} {one.lack()}"))
            return False
        if len(sizes) == 1:
            self._found.append((kind, one))
            return True
        again = kind.way.recomputes, kind.tensor, kind.sequence
        if again not in self._growth:
            other = self._plan(kind, sizes[1], verified=False)
            between = sizes[1] - sizes[0]
            self._growth[again] = {
                key: (size - one.costs.peaks[key]) // between for key, size in other.costs.peaks.items()
            }
        peaks = {key: size + self._growth[again].get(key, 0) for key, size in one.costs.peaks.items()}
        larger = replace(one, costs=replace(one.costs, peaks=peaks))
        self._found.append((kind, PeakLines((sizes[0], sizes[0] + 1), (one, larger))))
        if one.costs.kept:  # what is kept takes room from activations: without it the batch may be larger
            self._look_at(replace(kind, keeps=False))
        return True

    def _micro_batches(self, kind: PlanClass) -> list[int]:
        """Return the micro-batches that may be chosen, all of them or the first two of many."""
        if self.micro_batch is not None or not self.model.has_batches:
            return [self.micro_batch or int(self.base.get(MICRO, 1) or 1)]
        per_rank = self._per_rank(kind)
        return [1, 2] if per_rank is None else [one for one in range(1, per_rank + 1) if per_rank % one == 0]

    def _per_rank(self, kind: PlanClass) -> int | None:
        """Return the sequences of each rank of a class in a step if the configuration says how many all ranks have."""
        train = self.base.get(TRAIN)
        if not isinstance(train, int):
            return None
        sharing = max(1, self.machine.ranks.size // (ranks_of_batch(self.base) * kind.rows_shared_by))
        if train % sharing:
            raise ConfigError(f"{TRAIN} is {train}, which {sharing} ranks cannot share evenly: use a multiple")
        return train // sharing

    def _config(self, kind: PlanClass, micro_batch: int) -> dict[str, Any]:
        base = self.base
        if (per_rank := self._per_rank(kind)) is not None:
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
        if self._per_rank(kind) is None:
            return min(number, MOST)
        return max(one for one in self._micro_batches(kind) if one <= max(1, number))

    def _confirm(self, kind: PlanClass, found: PeakLines | PlanReport) -> Candidate | None:
        def plan(number: int) -> PlanReport:
            return self._plan(kind, number)

        if isinstance(found, PlanReport):
            number, report = found.config[MICRO], plan(found.config[MICRO])
        elif self._per_rank(kind) is None:
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


def _is_with_less(one: PlanClass, other: PlanClass) -> bool:
    """Return whether a class is another one with fewer ranks along the sequence."""
    return replace(one, sequence=None) == replace(other, sequence=None) and (one.sequence or 1) < (other.sequence or 1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the notes of many simulated engines out of the log."""
    log = logging.getLogger("shardwell")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
