"""Whether updates may go at once where `commit` is "auto": where nobody between a backward and its step could tell.

An update at once changes parameters while backward still runs. Who then looks at them before the step, gives the
gradients up, adds to them or changes the step, would get other numbers than from a step after the norm. So updates wait
for the norm at first, and units whose gradients of a boundary are complete are watched until the step. If nobody met
them for some steps, on any rank, updates go at once. Whoever meets a unit from then on gets an error, because what was
before is gone; a backward that begins in another way than those that were seen waits for the norm, for good.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from shardwell.errors import ShardwellError
from shardwell.memory.device import AsyncScalar
from shardwell.offload.host_updates import HostPending
from shardwell.offload.speculation import Options, are_same, hyperparameters_of
from shardwell.sharding import EngineContext, ShardedGroup, Unit
from shardwell.sharding.spec import CommitPolicy

STEPS_TO_LEARN = 3
_KEY = '"shardwell": {"commit": "after_norm"}'


class CommitPhase(enum.Enum):
    LEARNING = "updates wait for the norm, and steps are watched"
    AT_ONCE = "updates go at once, and whoever could tell gets an error"
    AFTER_NORM = "updates wait for the norm, for good"


@dataclass(frozen=True)
class StepBeginning:
    """How a backward begins: what is known of its graph before anything is updated."""

    num_forwards: int  # of the engine with gradients, since the backward before
    is_chained: bool  # an input of theirs has a graph of its own: another model's, say
    is_partial: bool  # parts of the model were called outside of the engine's forward
    keeps_graph: bool  # another backward may follow


@dataclass(frozen=True)
class WatchedUpdate:
    """What a unit awaits from the end of its backward to the step: nobody. Who comes all the same has to say so."""

    unit: Unit
    habit: AutoCommit
    arrival: HostPending | None  # of an update that was begun
    is_ahead: bool  # one was begun, on some ranks at least

    is_done = False  # nobody fetches it ahead

    def _meet(self) -> None:
        try:
            self.habit.meet(f"unit '{self.unit.name or '(root)'}' was used or looked at")
        except ShardwellError:
            self.unit.await_update(self, hides=True)  # whoever comes next hears the same
            raise

    def wait_local(self) -> None:
        self._meet()
        if self.arrival is not None:
            self.arrival.wait_local()

    def wait(self) -> None:
        self._meet()
        if self.arrival is not None:
            self.arrival.wait_local()
        if self.is_ahead:
            self.unit.publish()


class AutoCommit:
    """What a training loop does between a backward and its step. All ranks come to the same result."""

    def __init__(self, inner: Optimizer, context: EngineContext, units: list[Unit]) -> None:
        self._inner, self._context = inner, context
        self.phase = CommitPhase.LEARNING
        self._groups: dict[int, tuple[Unit, list[ShardedGroup]]] = {}  # by unit: whose updates go at once if they may
        self._begun: dict[int, bool] = {}  # units of this boundary, and whether all gradients of them were there
        self._watched: list[Unit] = []  # of those
        self._options: list[Options] = []  # of the step, when the first of them began
        self._is_stepping = False
        self._has_any = False  # gradients came at this boundary
        self._odd = ""  # what nobody may do while updates go at once; the others hear of it with the next norm
        self._told: Tensor | None = None  # how many ranks have something odd
        self._later: AsyncScalar | None = None  # the same, of the last step
        self._num_plain = 0  # steps, one after the other
        self._beginnings: set[StepBeginning] = set()  # of backwards, that were seen
        for unit in units:
            self.take(unit)

    @property
    def is_on(self) -> bool:
        """Some updates go at once if they may."""
        return bool(self._groups)

    # ---------------------------------------------------------------------------------------------------- units

    def take(self, unit: Unit) -> None:
        """Decide for a unit, as far as nobody has."""
        groups = [group for group in unit.trainable if group.row.commit is CommitPolicy.AUTO]
        if groups:
            self._groups[unit.index] = unit, groups
            self._apply(unit, groups)

    def leave(self, unit: Unit) -> None:
        unit.is_watched = False
        self._groups.pop(unit.index, None)
        self._begun.pop(unit.index, None)

    def _apply(self, unit: Unit, groups: list[ShardedGroup]) -> None:
        unit.is_watched = self.phase is not CommitPhase.AFTER_NORM
        for group in groups:
            group.commit_by(CommitPolicy.IMMEDIATE if self.phase is CommitPhase.AT_ONCE else CommitPolicy.AFTER_NORM)

    def _enter(self, phase: CommitPhase) -> None:
        self.phase = phase
        for unit, groups in self._groups.values():
            self._apply(unit, groups)

    # ------------------------------------------------------------------------------------------------- backward

    def backward_begins(self, beginning: StepBeginning) -> None:
        """Before anything of it is updated."""
        if self.phase is CommitPhase.LEARNING:
            self._beginnings.add(beginning)
        elif self.phase is CommitPhase.AT_ONCE and beginning not in self._beginnings and not self._begun:
            self._odd = f"a backward began in another way than in the first steps ({beginning})"
            self._wait_for_good()

    def watch(self, unit: Unit, arrival: HostPending | None, *, is_complete: bool) -> bool:
        """A unit's gradients of this boundary are reduced, and it was updated, or would have been; false if not here.

        `is_complete`: this rank had all gradients of it.
        """
        if unit.index not in self._groups:
            return False
        self._has_any = True
        if self.phase is CommitPhase.AFTER_NORM or self._is_stepping:
            return False
        if self._begun.get(unit.index):
            self.meet(f"unit '{unit.name or '(root)'}' got another gradient")
        if not self._begun:
            self._options = hyperparameters_of(self._inner)
        self._begun[unit.index] = is_complete
        self._watched.append(unit)
        is_ahead = self.phase is CommitPhase.AT_ONCE
        unit.await_update(WatchedUpdate(unit, self, arrival if is_ahead else None, is_ahead), hides=True)
        return True

    def has_begun(self, unit: Unit) -> bool:
        return unit.index in self._begun

    def meet(self, what: str) -> None:
        """Somebody does what would give other numbers, if units were updated at once in this boundary."""
        if self._begun and not self._is_stepping:
            self._note(what)

    def _note(self, what: str) -> None:
        if self.phase is CommitPhase.AT_ONCE:
            raise ShardwellError(
                f"{what} between a backward and its step, when {len(self._begun)} units had their update of that step "
                f'already. With "commit": "auto" updates go at once, while backward runs, after {STEPS_TO_LEARN} steps '
                f"in which nothing came in between. For loops in which something does, set {_KEY}. What was updated "
                "is not taken back: begin again, or load a checkpoint."
            )
        self._odd = self._odd or what

    def see_gradients(self, unit: Unit) -> None:
        """Somebody looks at a unit's gradients, or changes them."""
        if self.has_begun(unit):
            self.meet(f"gradients of unit '{unit.name or '(root)'}' were read or set")

    def excuse(self) -> None:
        """Everything of this boundary will be given up or overwritten, so nothing can be told any more."""
        self._release()
        self._begun.clear()

    def _release(self) -> None:
        """Nobody need come by any more to be told. Updates that were begun are awaited as ever."""
        watched, self._watched = self._watched, []
        for unit in watched if self.phase is not CommitPhase.AT_ONCE else ():
            unit.await_update(None)

    # ----------------------------------------------------------------------------------------------------- step

    def begin_step(self) -> None:
        """The step that everything waited for has come."""
        self._release()
        self._is_stepping = True

    def check_options(self) -> None:
        """The hyperparameters must be those that updates at once were done with."""
        if (
            self._begun
            and self.phase is not CommitPhase.AFTER_NORM
            and not are_same(self._options, hyperparameters_of(self._inner))
        ):
            self._note("hyperparameters changed")

    @property
    def says(self) -> float | None:
        """What is added up over the ranks with the norm; None: nothing."""
        return float(bool(self._odd)) if self._groups else None

    def hear(self, told: Tensor | None) -> None:
        """The sum of what all ranks say."""
        self._told = told

    def end_step(self) -> None:
        """It was applied: what it has shown counts."""
        told, self._told = self._told, None
        later, self._later = self._later, None
        is_virtual = self._context.device.is_meta
        if later is not None and float(later.get()) > 0 and self.phase is CommitPhase.AT_ONCE:
            self._hear_of_another()
        if told is None or self.phase is CommitPhase.AFTER_NORM or not self._has_any:
            return
        self._has_any = False
        if self.phase is CommitPhase.AT_ONCE:
            self._later = None if is_virtual else self._context.device.read_async(told)
            return
        if bool(self._odd) if is_virtual else float(told) > 0:
            self._hear_of_another()
            return
        self._num_plain += 1
        if self._num_plain == STEPS_TO_LEARN:
            self._enter(CommitPhase.AT_ONCE)
            self._say(logging.INFO, "updates go at once from now on, while backward runs: nothing came between")

    def forget(self) -> None:
        """This boundary is over."""
        self._release()
        self._begun.clear()
        self._is_stepping = False

    def _hear_of_another(self) -> None:
        self._odd = self._odd or "something came between a backward and its step on another rank"
        self._wait_for_good()

    def _wait_for_good(self) -> None:
        level = logging.WARNING if self.phase is CommitPhase.AT_ONCE else logging.INFO
        self._enter(CommitPhase.AFTER_NORM)
        self._say(level, f"updates wait for the norm from now on, because {self._odd}; after")

    def _say(self, level: int, what: str) -> None:
        if self._context.world.mesh.rank == 0:
            text = '"commit": "auto": %s a backward and its step in %d steps'
            logging.getLogger("shardwell").log(level, text, what, self._num_plain)
