"""Updating ahead of the norm: units whose row does not wait are stepped while backward still runs.

*At once*: the update is final, and the gradients are freed. *Shadow*: what it overwrites is kept until the norm shows
that nothing was clipped and everything was finite; otherwise the unit goes back to its untouched old state and is
stepped again with the factor. Both give the bits that a step after the norm gives, because it is the same step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwell.errors import ShardwellError
from shardwell.memory import Scratch
from shardwell.optim.host import Arrival
from shardwell.optim.norms import norm_of
from shardwell.optim.shards import Shard
from shardwell.unit import Unit
from shardwell.unit.table import Commit


class Shadow:
    """The masters of some shards, and their optimizer state, as they were."""

    def __init__(self, shards: list[Shard], states: dict[Tensor, Any]) -> None:
        self._groups = {shard.group for shard in shards}
        with self._opened(changes=False):
            self._masters = [(shard.tensor, shard.tensor.clone()) for shard in shards]
        self._states = {shard.tensor: _copied(states[shard.tensor]) for shard in shards if shard.tensor in states}

    @contextlib.contextmanager
    def _opened(self, *, changes: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for group in self._groups:
                stack.enter_context(group.opened_master(changes=changes))
            yield

    def restore(self, states: dict[Tensor, Any]) -> None:
        with self._opened(changes=True):
            for tensor, before in self._masters:
                tensor.copy_(before)
        for tensor, _ in self._masters:
            states.pop(tensor, None)
            if tensor in self._states:
                states[tensor] = self._states[tensor]


class Ahead:
    """The units that were updated before the norm of this boundary was known."""

    def __init__(
        self,
        inner: Optimizer,
        scratch: Scratch,
        shards_of: Callable[[Unit], list[Shard]],
        update: Callable[[Unit, Tensor | None], None],
    ) -> None:
        self._inner, self._scratch, self._shards_of, self._update = inner, scratch, shards_of, update
        self._units: dict[int, tuple[Unit, Shadow | None]] = {}
        self.norms: dict[int, list[tuple[Tensor, bool]]] = {}  # by unit: of gradients that are gone, see `norm_of`

    def update(self, unit: Unit) -> None:
        """Step a unit whose gradients are complete, if its row does not wait for the norm."""
        commits = {group.row.commit for group in unit.trainable} - {Commit.AFTER_NORM}
        shards = [shard for shard in self._shards_of(unit) if shard.gradient is not None]
        if not commits or not shards:
            return
        commit = commits.pop()
        if unit.index in self._units:  # a gradient came late: what was done was done with too little
            shadow = self._units[unit.index][1]
            if shadow is None:
                raise ShardwellError(
                    f"unit '{unit.name}' got another gradient after its update at once; commit after the norm"
                )
            shadow.restore(self._inner.state)
        else:
            shadow = Shadow(shards, self._inner.state) if commit is Commit.SHADOW else None
        self._units[unit.index] = unit, shadow
        if shadow is None:
            self.norms[unit.index] = [norm_of(shard) for shard in shards]
        self._update(unit, None)
        for group in {shard.group for shard in shards} if shadow is None else ():
            self._scratch.give(group.gradients.part_with())

    def commit(self, may_step: bool, factor: Tensor | None) -> set[int]:
        """The norm is known: keep what was done, or do it again. Returns the units that need no further step."""
        if not may_step:
            self.take_back()
        elif factor is not None and self._units and float(factor) < 1.0:
            for unit, shadow in self._units.values():
                assert shadow is not None, "an update that is clipped must not be committed at once"
                shadow.restore(self._inner.state)
                self._update(unit, factor)
        done = set(self._units)
        self._units = {}
        return done

    def forget_gradients(self) -> None:
        """This boundary is over; what did not become final is taken back."""
        self.take_back()
        self.norms = {}

    def take_back(self) -> None:
        """The step is not applied after all."""
        for _, shadow in self._units.values():
            if shadow is not None:
                shadow.restore(self._inner.state)
        self._units = {}


@dataclass(frozen=True)
class Early:
    """An update that no step has published, for who needs the unit: he waits for it, and all ranks are sent it."""

    unit: Unit
    arrival: Arrival | None  # None: it was done in line, or on other ranks only

    @property
    def is_known(self) -> bool:
        return self.arrival is None or self.arrival.is_known

    def hear(self) -> None:
        if self.arrival is not None:
            self.arrival.hear()

    def wait(self) -> None:
        self.hear()
        self.unit.publish()


class Done:
    """Nothing to wait for, in place of an update that other ranks wait for: what follows comes as late as theirs."""

    is_known = True

    def hear(self) -> None: ...

    def wait(self) -> None: ...


class Unpublished:
    """Units with updates that were begun and not published yet: the same on all ranks."""

    def __init__(self) -> None:
        self._units: dict[int, Unit] = {}

    def add(self, unit: Unit, arrival: Arrival | None) -> None:
        """An update was begun: whoever looks from now on waits for it, and sees no second copy of what was before."""
        for group in unit.trainable:
            group.forget_second_copy()
        self._units[unit.index] = unit
        unit.await_update(Early(unit, arrival))

    def remove(self, unit: Unit) -> None:
        """The caller publishes it now."""
        if self._units.pop(unit.index, None) is not None:
            unit.await_update(None)

    def give_up(self, end: Callable[[Unit], Arrival | None], *, together: bool) -> None:
        """No step will publish them any more: `end` says what there is to wait for.

        They are published here, or if other ranks do not come here, by who needs them.
        """
        units, self._units = self._units, {}
        for unit in units.values():
            arrival = end(unit)
            unit.await_update(None if together else Early(unit, arrival))
            if together:
                unit.publish(arrival or Done())


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
