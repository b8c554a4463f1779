"""Speculative updates: they are computed before the norm is known, in other memory, and leave the old state as it is.

They are committed if everything is at the step as was assumed: gradients, master weights, state, hyperparameters, and
the factor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell.kernels import Moment8bit
from shardwell.memory import MemoryStats, StateKind, Tier
from shardwell.offload.cpu_kernels import SpareState
from shardwell.optim.param_slices import ParamSlice
from shardwell.sharding import ShardedGroup, Unit

_LONGEST = 64


Options = dict[str, Any]  # hyperparameters of a parameter group


def hyperparameters_of(inner: Optimizer) -> list[Options]:
    """Return a copy of the current hyperparameters of each parameter group."""

    def as_it_is(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value  # schedules change tensors in place

    groups = inner.param_groups
    return [{key: as_it_is(value) for key, value in group.items() if key != "params"} for group in groups]


def are_same(some: list[Options], others: list[Options]) -> bool:
    """Return whether two steps with these hyperparameters are the same."""
    return len(some) == len(others) and all(
        one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
        for one, other in zip(some, others, strict=True)
    )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


class SpeculativeState:
    """The memory that a unit's speculative update writes to; a commit swaps it with the live memory."""

    def __init__(
        self, unit: Unit, shards: list[ParamSlice], states: dict[Tensor, Any], memory_stats: MemoryStats
    ) -> None:
        self._shards = shards
        self._masters: dict[ShardedGroup, Tensor] = {
            shard.group: torch.zeros_like(shard.group.master) for shard in shards
        }  # of full groups, including padding
        self.spares = {shard: SpareState(self._slice_of_master(shard), _like(states[shard.tensor])) for shard in shards}
        memory = [*self._masters.values(), *(value for spare in self.spares.values() for value in spare.state.values())]
        self._books = memory_stats, unit.name, sum(value.nbytes for value in memory)
        memory_stats.add(StateKind.STAGING, unit.name, Tier.HOST, self._books[2])

    def strike_out(self) -> None:
        """Remove the memory from the statistics. It is freed with the last reference to it."""
        memory_stats, unit, num_bytes = self._books
        memory_stats.remove(StateKind.STAGING, unit, Tier.HOST, num_bytes)

    def fits(self, shards: list[ParamSlice]) -> bool:
        """Return whether it was made for these shards; shards can be sliced again."""
        return len(shards) == len(self._shards) and all(a is b for a, b in zip(shards, self._shards, strict=True))

    def _slice_of_master(self, shard: ParamSlice) -> Tensor:
        return self._masters[shard.group][shard.start : shard.start + shard.tensor.numel()]

    def commit(self, states: dict[Tensor, Any]) -> None:
        """Swap the memory with that of the optimizer."""
        for group, masters in self._masters.items():
            group.swap_masters(masters)
        for shard, spare in self.spares.items():
            spare.master.data = self._slice_of_master(shard)
            live = states[shard.tensor]
            for key, value in spare.state.items():
                _exchange(live[key], value)


class SpeculationBackoff:
    """Decides whether to speculate: not for some steps after a failure, and for twice as many after the next."""

    def __init__(self) -> None:
        self._pause, self._left = 1, 0
        self._tried = self._failed = False
        self._may: bool | None = None  # the decision for this step

    def note_failure(self) -> None:
        """Note that an update was not committed. Any thread may call it."""
        self._failed = True

    @property
    def may_speculate(self) -> bool:
        """Whether to speculate at this step."""
        if self._may is None:
            self._may = self._tried = self._decide()
        return self._may

    def _decide(self) -> bool:
        if self._left:
            self._left -= 1
        elif self._failed:
            self._failed = False
            self._left, self._pause = self._pause - 1, min(2 * self._pause, _LONGEST)
        else:
            self._pause = max(1, self._pause // 2) if self._tried else self._pause
            return True
        return False

    def end_step(self) -> None:
        """Note the end of a step; the next one decides again."""
        self._may = None


def covers(shards: list[ParamSlice]) -> bool:
    """Return whether shards cover all master weights of their groups: only then can the memory be swapped."""
    pieces = dict.fromkeys((shard.group for shard in shards), 0)
    for shard in shards:
        pieces[shard.group] += len(shard.pieces)
    return all(pieces[group] == sum(len(run.pieces) for run in group.spans) for group in pieces)


def _like(state: dict[str, Any]) -> dict[str, Any]:
    """Return uninitialised memory like that of a state, without its scalars."""
    return {
        key: value.empty_like() if isinstance(value, Moment8bit) else torch.empty_like(value)
        for key, value in state.items()
        if isinstance(value, Moment8bit) or (isinstance(value, Tensor) and value.ndim)
    }


def _exchange(one: Any, other: Any) -> None:
    """Swap the memory of two entries."""
    if isinstance(one, Moment8bit):
        one.exchange(other)
    else:
        before, one.data = one.data, other.data
        other.data = before
