"""Updates before the norm: units whose spec does not wait for the norm are stepped while backward still runs.

*At once*: the update is final, and the gradients are freed. *Shadow* (speculation): what the update overwrites is kept
until the norm shows that nothing was clipped and everything was finite; otherwise the unit returns to its untouched old
state and is stepped again with the factor. Both give the bits of a step after the norm, because it is the same step.
Until then a speculative update is invisible: code that reads or changes the unit revokes the update first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwell.errors import ShardwellError
from shardwell.memory import TemporaryBuffers
from shardwell.offload.host_updates import HostPending
from shardwell.offload.speculation import Options, are_same, hyperparameters_of
from shardwell.optim.auto_commit import AutoCommit
from shardwell.optim.grad_norm import norm_of
from shardwell.optim.param_slices import ParamSlice
from shardwell.sharding import Unit
from shardwell.sharding.spec import CommitPolicy


class InlineSpeculativeState:
    """A copy of the master weights of some shards, and of their optimizer state, before a speculative update."""

    def __init__(self, shards: list[ParamSlice], states: dict[Tensor, Any]) -> None:
        self._groups = {shard.group for shard in shards}
        with self._opened(changes=False):
            self._masters = [(shard.tensor, shard.tensor.clone()) for shard in shards]
        self._states = {shard.tensor: _copied(states[shard.tensor]) for shard in shards if shard.tensor in states}

    @contextlib.contextmanager
    def _opened(self, *, changes: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for group in self._groups:
                stack.enter_context(group.open_master(changes=changes))
            yield

    def restore(self, states: dict[Tensor, Any]) -> None:
        """Write the copies back."""
        with self._opened(changes=True):
            for tensor, before in self._masters:
                tensor.copy_(before)
        for tensor, _ in self._masters:
            states.pop(tensor, None)
            if tensor in self._states:
                states[tensor] = self._states[tensor]


@dataclass(frozen=True)
class InlineStep:
    """The update of one unit on the training thread, before the norm was known."""

    shadow: InlineSpeculativeState | None  # None: the update is final
    options: list[Options]  # the hyperparameters that it was done with


class EarlyUpdates:
    """The units that were updated on the training thread before the norm of this boundary was known."""

    def __init__(
        self,
        inner: Optimizer,
        scratch: TemporaryBuffers,
        shards_of: Callable[[Unit], list[ParamSlice]],
        update: Callable[[Unit], None],
    ) -> None:
        self._inner, self._scratch, self._shards_of, self._update = inner, scratch, shards_of, update
        self._steps: dict[int, InlineStep] = {}  # by unit
        self.norms: dict[int, list[tuple[Tensor, bool]]] = {}  # by unit: of freed gradients, see `norm_of`

    def update(self, unit: Unit) -> None:
        """Step a unit whose gradients are complete, if its spec does not wait for the norm."""
        commit = commit_of(unit)
        shards = [shard for shard in self._shards_of(unit) if shard.gradient is not None]
        if commit is CommitPolicy.AFTER_NORM or not shards:
            return
        self.take_back(unit)  # a gradient came late: the update was computed without it
        if unit.index in self._steps:
            raise ShardwellError(
                f"unit '{unit.name}' got another gradient after its update at once; commit after the norm"
            )
        shadow = InlineSpeculativeState(shards, self._inner.state) if commit is CommitPolicy.SPECULATIVE else None
        self._steps[unit.index] = InlineStep(shadow, hyperparameters_of(self._inner))
        if shadow is None:
            self.norms[unit.index] = [norm_of(shard) for shard in shards]
        self._update(unit)
        for group in {shard.group for shard in shards} if shadow is None else ():
            self._scratch.free(group.gradients.discard_result())

    def commit(self, may_step: bool, factor: Tensor | None) -> set[int]:
        """Keep or revoke the updates, now that the norm is known. Return the units that need no further step."""
        is_clipped = bool(self._steps) and factor is not None and float(factor) < 1.0
        options = hyperparameters_of(self._inner)
        steps, self._steps = self._steps, {}
        for index, step in list(steps.items()):
            if step.shadow is not None and (not may_step or is_clipped or not are_same(step.options, options)):
                step.shadow.restore(self._inner.state)
                del steps[index]
        return set(steps)

    def forget_gradients(self) -> None:
        """End this boundary, and revoke the updates that are not final."""
        self.commit(False, None)
        self.norms = {}

    def take_back(self, unit: Unit) -> None:
        """Revoke a unit's update, unless it is final."""
        step = self._steps.get(unit.index)
        if step is not None and step.shadow is not None:
            del self._steps[unit.index]
            step.shadow.restore(self._inner.state)


def commit_of(unit: Unit) -> CommitPolicy:
    """Return the commit policy of a unit: that of its groups below the device, if there are any."""
    commits = {group.row.commit for group in unit.trainable} - {CommitPolicy.AFTER_NORM}
    return next(iter(commits), CommitPolicy.AFTER_NORM)


@dataclass(frozen=True)
class PublishAfter:
    """An update that no step has published: code that needs the unit waits for it and publishes it to all ranks."""

    unit: Unit
    arrival: HostPending | None  # None: the update ran on the training thread, or on other ranks only

    @property
    def is_done(self) -> bool:
        return self.arrival is None or self.arrival.is_done

    def wait_local(self) -> None:
        if self.arrival is not None:
            self.arrival.wait_local()

    def wait(self) -> None:
        self.wait_local()
        self.unit.publish()


@dataclass(frozen=True)
class Revocable:
    """An update that is not committed yet: code that needs the unit revokes it and sees the values from before.

    A rank can do so alone: nothing was published, and the result of the step is the same.
    """

    unit: Unit
    take_back: Callable[[Unit], None]

    is_done = False

    def wait_local(self) -> None:
        self.take_back(self.unit)

    def wait(self) -> None:
        self.take_back(self.unit)


class NothingPending:
    """Nothing to wait for, in place of an update of other ranks, so that all ranks defer publishing alike."""

    is_done = True

    def wait_local(self) -> None: ...

    def wait(self) -> None: ...


class UnpublishedUnits:
    """The units with updates that have begun and are not published yet. All ranks have the same ones."""

    def __init__(self, ways_back: list[Callable[[Unit], None]], habit: AutoCommit) -> None:
        """`ways_back` are the functions that revoke updates that are not final."""
        self._ways_back, self._habit = ways_back, habit
        self._units: dict[int, Unit] = {}

    def begin(self, unit: Unit, arrival: HostPending | None, *, is_complete: bool) -> None:
        """Note that a unit's gradients were reduced, and that it may have been updated before the norm."""
        commit = commit_of(unit)
        if self._habit.watch(unit, arrival, is_complete=is_complete):
            if commit is CommitPolicy.IMMEDIATE:
                self._note(unit)
                unit.is_ahead = True
        elif commit is CommitPolicy.SPECULATIVE:
            self._note(unit)
            unit.await_update(Revocable(unit, self.take_back), hides=True)
        elif commit is CommitPolicy.IMMEDIATE:
            self.add(unit, arrival)

    def take_back(self, unit: Unit) -> None:
        """Revoke a unit's early update, unless it is final, because the unit is read before the step."""
        for take_back in self._ways_back:
            take_back(unit)

    def add(self, unit: Unit, arrival: HostPending | None) -> None:
        """Note an update that has begun: reads wait for it, and the secondary shard of old values is dropped."""
        self._note(unit)
        unit.is_ahead = True
        unit.await_update(PublishAfter(unit, arrival))

    def _note(self, unit: Unit) -> None:
        for group in unit.trainable:
            group.invalidate_secondary()
        self._units[unit.index] = unit

    def remove(self, unit: Unit) -> None:
        """Remove a unit that the caller publishes now."""
        if self._units.pop(unit.index, None) is not None:
            unit.is_ahead = False
            unit.await_update(None)

    def give_up(self, end: Callable[[Unit], HostPending | None], *, together: bool) -> None:
        """Give up on a step that publishes the units. `end` returns what there is to wait for.

        With `together` they are published here. Otherwise, because other ranks do not come here, code that needs them
        does it.
        """
        units, self._units = self._units, {}
        for unit in units.values():
            unit.is_ahead = False
            arrival = end(unit)
            unit.await_update(None if together else PublishAfter(unit, arrival))
            if together:
                unit.publish(arrival or NothingPending())


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
