"""Uneven data: a rank that is out of batches repeats its last one until all ranks are out of batches.

Before each forward the ranks exchange whether they have a batch. A rank without one repeats its last batch, so that the
collectives of the other ranks complete, and contributes gradients of zero. So the sum is that of the ranks that had
data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardwell.engine.data_loader import ShardedLoader
from shardwell.engine.unsupported_uses import StepCallWatch, flag
from shardwell.engine.user_data_loader import UserDataLoader
from shardwell.errors import ShardwellError
from shardwell.runtime.pytree import tensors_in
from shardwell.runtime.reducer import StepCounts

if TYPE_CHECKING:
    from shardwell.engine.engine import Engine


@dataclass
class UserLoop:
    """The user's training loop: its steps, its data, whether it runs inside `Engine.join`, whether it steps at all."""

    counts: StepCounts = field(default_factory=StepCounts)
    data_loader: ShardedLoader | UserDataLoader | None = None
    join: Join | None = None
    step_watch: StepCallWatch | None = field(default_factory=StepCallWatch)


class StepCount:
    """A number of `StepCounts` as an attribute of the engine, whose loop counts."""

    def __init__(self, words: str) -> None:
        self.__doc__ = words

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: Any, owner: type) -> int:
        if engine is None:
            return self  # type: ignore[return-value]  # of the class: for `help()`
        number: int = getattr(engine._loop.counts, self._name)
        return number

    def __set__(self, engine: Any, number: int) -> None:
        setattr(engine._loop.counts, self._name, number)


class Join:
    """One loop over data of which ranks may have different numbers of batches."""

    def __init__(self, engine: Engine, divide_by_initial_world_size: bool) -> None:
        self._engine, self._divides_by_all = engine, divide_by_initial_world_size
        self._batch: tuple[Any, Any] | None = None  # the last batch
        self._began_at = -1  # the micro-step of the last forward
        self._is_shadow = False

    def begin(self, args: Any, kwargs: Any) -> None:
        """Begin a forward with gradients on this rank."""
        if self._is_shadow:
            return
        if self._began_at == self._engine.micro_steps:
            raise ShardwellError(
                "two forwards with gradients before a step inside `engine.join()`: ranks without data repeat one "
                "forward, one backward and one step for each batch of the others. Call engine.step() after each "
                "backward, or give all ranks the same number of batches."
            )
        self._began_at = self._engine.micro_steps
        self._batch = args, kwargs
        self._ask(has_data=True)

    def _ask(self, *, has_data: bool) -> bool:
        """Return whether any rank has data. All ranks ask at the same time."""
        everyone = self._engine._context.roles.all
        has_nothing = not has_data and self._batch is None
        counts = torch.tensor([has_data, has_nothing], dtype=torch.float64, device=everyone.device.torch_device)
        everyone.all_reduce_sum(counts, "JOIN")
        num_with, num_with_nothing = (int(count) for count in counts.tolist())
        if num_with and num_with_nothing:
            raise ShardwellError(
                f"{num_with_nothing} of {everyone.rank_group.size} ranks had no batch at all inside `engine.join()`: "
                "they have nothing to repeat while the others train. Give each rank one batch at least."
            )
        grid = self._engine._context.roles.grid
        num_with //= grid.pipe * grid.tensor  # these ranks have the same batches
        num_averaged = grid.num_batches * grid.sequence
        self._engine._scheduler.reducer.average_over(num_averaged if self._divides_by_all else max(num_with, 1))
        return num_with > 0

    def shadow(self) -> None:
        """Repeat the last batch on this rank, which is out of data, until all ranks are."""
        self._is_shadow = True
        while self._ask(has_data=False):
            self._repeat()

    def _repeat(self) -> None:
        assert self._batch is not None
        engine, (args, kwargs) = self._engine, self._batch
        buffers = [(buffer, buffer.clone()) for buffer in engine.module.buffers()]  # a batch counts once in buffers
        output = engine(*args, **kwargs)
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        engine.backward(torch.stack([_nothing_of(tensor) for tensor in outputs]).sum())
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        engine.step()


def _nothing_of(output: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradients are zeros, whatever was computed."""
    return output.nan_to_num(0.0, 0.0, 0.0).float().sum() * 0.0


@contextlib.contextmanager
def joined(engine: Engine, divide_by_initial_world_size: bool) -> Iterator[None]:
    """Implement `Engine.join`."""
    divide_by_initial_world_size = flag(divide_by_initial_world_size, "join(divide_by_initial_world_size=...)")
    if engine._loop.join is not None:
        raise ShardwellError("engine.join() is open already: one loop over data is inside one of them")
    engine._loop.join = Join(engine, divide_by_initial_world_size)
    try:
        with engine._context.roles.agreement.failing_together("a loop inside engine.join()"):
            yield
        engine._loop.join.shadow()
    finally:
        engine._loop.join = None
        engine._scheduler.reducer.average_over(engine._context.roles.averaged.rank_group.size)
