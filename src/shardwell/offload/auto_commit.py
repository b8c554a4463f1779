"""The "auto" commit policy: updates are immediate where the training loop cannot notice the difference.

An immediate update changes parameters while backward still runs. A training loop that reads them before the step,
drops, adds to or changes the gradients, or changes the step would get other results than with a step after the norm. So
updates wait for the norm at first, and units whose gradients of a boundary are complete are watched until the step. If
nothing used them before the step for some steps, on any rank, updates become immediate. From then on such a use raises
an error, because the old values are gone. A backward that begins in another way than those of the first steps makes
updates wait for the norm for good.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell import virtual_time
from shardwell.errors import ShardwellError
from shardwell.memory.device import AsyncScalar
from shardwell.offload.loop_observer import StepBeginning
from shardwell.offload.speculation import Options, are_same, hyperparameters_of
from shardwell.sharding import EngineContext, ShardedGroup, Unit
from shardwell.sharding.pending_update import PendingUpdate
from shardwell.sharding.spec import CommitPolicy

STEPS_TO_LEARN = 3
_KEY = '"shardwell": {"commit": "after_norm"}'


class CommitPhase(enum.Enum):
    """The phases of the "auto" commit policy."""

    LEARNING = "updates wait for the norm, and steps are watched"
    AT_ONCE = "updates are applied immediately, and code that could notice gets an error"
    AFTER_NORM = "updates wait for the norm, for good"


@dataclass(frozen=True)
class WatchedUpdate:
    """A pending update of a watched unit: any use of the unit before the step is recorded, or is an error."""

    unit: Unit
    auto: AutoCommit
    arrival: PendingUpdate | None  # of an update that was started
    is_early: bool  # an update was started on some ranks at least

    is_done = False  # a prefetch never waits for it

    def _notice(self) -> None:
        try:
            self.auto.notice(f"unit '{self.unit.name or '(root)'}' was used or looked at")
        except ShardwellError:
            self.unit.await_update(self, hides=True)  # the next use raises the same error
            raise

    def wait_local(self) -> None:
        """Record the use, and wait for this rank's part of the update."""
        self._notice()
        if self.arrival is not None:
            self.arrival.wait_local()

    def wait(self) -> None:
        """Record the use, wait for the update and publish it."""
        self._notice()
        if self.arrival is not None:
            self.arrival.wait_local()
        if self.is_early:
            self.unit.publish()


class AutoCommit:
    """The decision of the "auto" commit policy, the same on all ranks.

    It depends on what a training loop does between a backward and its step.
    """

    spans_stages = False  # each stage of a pipeline decides for itself

    def __init__(self, inner: Optimizer, context: EngineContext, units: list[Unit]) -> None:
        self._inner, self._context = inner, context
        self.phase = CommitPhase.LEARNING
        # by unit: groups whose updates may become immediate
        self._groups: dict[int, tuple[Unit, list[ShardedGroup]]] = {}
        self._begun: dict[int, bool] = {}  # units of this boundary, and whether all their gradients were there
        self._watched: list[Unit] = []  # the watched ones of these
        self._options: list[Options] = []  # hyperparameters when the first of these began
        self._is_stepping = False
        self._has_any = False  # gradients arrived at this boundary
        self._conflict = ""  # what conflicts with immediate updates; other ranks learn of it with the next norm
        self._num_conflicts: Tensor | None = None  # how many ranks found a conflict
        self._later: AsyncScalar | None = None  # the same, of the last step
        self._num_plain = 0  # consecutive steps without a conflict
        self._beginnings: set[StepBeginning] = set()  # the beginnings of backwards in the learning phase
        for unit in units:
            self.enter(unit)

    @property
    def is_on(self) -> bool:
        """Whether any group has the "auto" commit policy."""
        return bool(self._groups)

    # ---------------------------------------------------------------------------------------------------- units

    def enter(self, unit: Unit) -> None:
        """Apply the decision to the groups of a unit that have the "auto" commit policy."""
        groups = [group for group in unit.trainable if group.spec.commit is CommitPolicy.AUTO]
        if groups:
            self._groups[unit.index] = unit, groups
            self._apply(unit, groups)

    def leave(self, unit: Unit) -> None:
        """Stop watching a unit."""
        unit.updates.is_watched = False
        self._groups.pop(unit.index, None)
        self._begun.pop(unit.index, None)

    def _apply(self, unit: Unit, groups: list[ShardedGroup]) -> None:
        unit.updates.is_watched = self.phase is not CommitPhase.AFTER_NORM
        for group in groups:
            group.commit_by(CommitPolicy.IMMEDIATE if self.phase is CommitPhase.AT_ONCE else CommitPolicy.AFTER_NORM)

    def _begin_phase(self, phase: CommitPhase) -> None:
        self.phase = phase
        for unit, groups in self._groups.values():
            self._apply(unit, groups)

    # ------------------------------------------------------------------------------------------------- backward

    def backward_begins(self, beginning: StepBeginning) -> None:
        """Check the beginning of a backward, before anything is updated."""
        if self.phase is CommitPhase.LEARNING:
            self._beginnings.add(beginning)
        elif self.phase is CommitPhase.AT_ONCE and beginning not in self._beginnings and not self._begun:
            self._conflict = f"a backward began in another way than in the first steps ({beginning})"
            self._wait_for_good()

    def watch(self, unit: Unit, arrival: PendingUpdate | None, *, is_complete: bool) -> bool:
        """Watch a unit from its reduce-scatter at this boundary to the step; false if it is not watched.

        `is_complete`: this rank has all its gradients. The unit was updated, or would have been.
        """
        if unit.index not in self._groups:
            return False
        self._has_any = True
        if self.phase is CommitPhase.AFTER_NORM or self._is_stepping:
            return False
        if self._begun.get(unit.index):
            self.notice(f"unit '{unit.name or '(root)'}' got another gradient")
        if not self._begun:
            self._options = hyperparameters_of(self._inner)
        self._begun[unit.index] = is_complete
        self._watched.append(unit)
        is_early = self.phase is CommitPhase.AT_ONCE
        unit.await_update(WatchedUpdate(unit, self, arrival if is_early else None, is_early), hides=True)
        return True

    def has_begun(self, unit: Unit) -> bool:
        """Return whether the unit has had its update of this boundary, or would have had it."""
        return unit.index in self._begun

    def notice(self, what: str) -> None:
        """Record an action that would give other results if units were updated immediately at this boundary."""
        if self._begun and not self._is_stepping:
            self._conflict_with(what)

    def _conflict_with(self, what: str) -> None:
        if self.phase is CommitPhase.AT_ONCE:
            raise ShardwellError(
                f"{what} between a backward and its step, when {len(self._begun)} units had their update of that step "
                f'already. With "commit": "auto" updates go at once, while backward runs, after {STEPS_TO_LEARN} steps '
                f"in which nothing came in between. For loops in which something does, set {_KEY}. What was updated "
                "is not taken back: begin again, or load a checkpoint."
            )
        self._conflict = self._conflict or what

    def gradients_read(self, unit: Unit) -> None:
        """Record that a unit's gradients are read or changed."""
        if self.has_begun(unit):
            self.notice(f"gradients of unit '{unit.name or '(root)'}' were read or set")

    def stop_watching(self) -> None:
        """Stop watching: everything of this boundary will be dropped or overwritten."""
        self._release()
        self._begun.clear()

    def _release(self) -> None:
        """Stop watching units; updates that were started are still waited for."""
        watched, self._watched = self._watched, []
        for unit in watched if self.phase is not CommitPhase.AT_ONCE else ():
            unit.await_update(None)

    # ----------------------------------------------------------------------------------------------------- step

    def begin_step(self) -> None:
        """Begin the step: units are not watched any more."""
        self._release()
        self._is_stepping = True

    def check_options(self) -> None:
        """Check that the hyperparameters are those that immediate updates used."""
        if (
            self._begun
            and self.phase is not CommitPhase.AFTER_NORM
            and not are_same(self._options, hyperparameters_of(self._inner))
        ):
            self._conflict_with("hyperparameters changed")

    def append_to(self, parts: list[Tensor]) -> None:
        """Append whether this rank has a conflict, as a number that is summed over the ranks with the norm."""
        parts.append(self._context.device.scalar(float(bool(self._conflict)), torch.float64).view(1))

    def take_sum(self, total: Tensor) -> None:
        """Take the number of ranks that have a conflict."""
        self._num_conflicts = total

    def end_step(self) -> None:
        """Count a step that was applied, and change the phase if that follows."""
        num_conflicts, self._num_conflicts = self._num_conflicts, None
        later, self._later = self._later, None
        is_meta = self._context.device.is_meta
        if later is not None and float(later.get()) > 0 and self.phase is CommitPhase.AT_ONCE:
            self._follow_other_rank()
        if num_conflicts is None or self.phase is CommitPhase.AFTER_NORM or not self._has_any:
            return
        self._has_any = False
        if self.phase is CommitPhase.AT_ONCE:
            self._later = None if is_meta else self._context.device.read_async(num_conflicts)
            return
        if bool(self._conflict) if is_meta else float(num_conflicts) > 0:
            self._follow_other_rank()
            return
        self._num_plain += 1
        if self._num_plain == self._steps_to_learn():
            self._begin_phase(CommitPhase.AT_ONCE)
            self._log(logging.INFO, "updates go at once from now on, while backward runs: nothing came between")

    def _steps_to_learn(self) -> int:
        """Return 1 in a plan of time, which is about the steps after these.

        With state on disk, where transfers decide, steps at once differ by turns: a plan has those after the norm.
        """
        return STEPS_TO_LEARN if virtual_time.clock is None or self._context.disk is not None else 1

    def forget(self) -> None:
        """End this boundary."""
        self._release()
        self._begun.clear()
        self._is_stepping = False

    def _follow_other_rank(self) -> None:
        self._conflict = self._conflict or "something came between a backward and its step on another rank"
        self._wait_for_good()

    def _wait_for_good(self) -> None:
        level = logging.WARNING if self.phase is CommitPhase.AT_ONCE else logging.INFO
        self._begin_phase(CommitPhase.AFTER_NORM)
        self._log(level, f"updates wait for the norm from now on, because {self._conflict}; after")

    def _log(self, level: int, what: str) -> None:
        if self._context.roles.all.rank_group.rank == 0:
            text = '"commit": "auto": %s a backward and its step in %d steps'
            logging.getLogger("shardwell").log(level, text, what, self._num_plain)
