"""The optimizer that the user holds: norm, overflow check and clipping over this rank's shards.

Its `UpdateExecutor` performs the updates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardwell.errors import NonFiniteError, ShardwellError
from shardwell.memory import StateKind, Tier
from shardwell.optim.executor import StepOptions, UpdateExecutor
from shardwell.optim.factory import NO_LABEL, OptimizerFactory
from shardwell.optim.grad_norm import (
    GradNorm,
    OverflowCheck,
    SummedNumber,
    check_finite_options,
    clip_factor,
    hyperparameter_checks,
)
from shardwell.optim.param_slices import ParamSlice, ParamSlices, bytes_of_state, check_cut, scalar_state
from shardwell.optim.user_optimizer import SteppingEngine, meet_foreign_step, step_with
from shardwell.sharding import EngineContext, Unit, released
from shardwell.sharding.pending_update import PendingUpdate


class StepObserver(Protocol):
    """An object that learns when a step begins."""

    def step_begins(self) -> None:
        """Note a step, before its backward is finished."""


class StepScheduler(Protocol):
    """The part of the scheduler that a step needs."""

    @property
    def observer(self) -> StepObserver | None:
        """Return what learns how passes and steps begin, if anything does."""

    def finish_backward(self) -> None:
        """Finish everything that backward started."""

    def after_update(self, unit: Unit, arrival: PendingUpdate | None) -> None:
        """Record a unit's update, and publish it."""


class ShardedOptimizer(Optimizer):
    """An optimizer over this rank's shards; its `param_groups` are those of the inner one, so schedulers attach."""

    inner: Optimizer

    def __init__(
        self,
        factory: OptimizerFactory,
        executor: UpdateExecutor,
        context: EngineContext,
        options: StepOptions,
        scheduler: StepScheduler,
    ) -> None:
        super().__init__([torch.zeros(0)], {})
        self._factory, self._context = factory, context
        self._scheduler, self.scale = scheduler, options.scale
        self.executor, self.inner = executor, executor.inner
        self.trainer: Callable[[], SteppingEngine | None] = lambda: None  # the engine: its `step` is called
        self.defaults, self.param_groups, self.state = self.inner.defaults, self.inner.param_groups, self.inner.state
        self._has_initial_state = bool(self.state)  # as Adagrad has
        summed = [*hyperparameter_checks(context, self.inner), *executor.summed_with_norm]
        self._grad_norm = GradNorm(context, self.shards, summed, options.clip)
        self._overflow_check = OverflowCheck(
            context, self.shards, self.scale, executor.describe_partial, policy=options.nonfinite
        )
        self._num_states = -1

    @property
    def optimizer(self) -> Optimizer:
        """Return the inner torch optimizer."""
        return self.inner

    @property
    def shards(self) -> ParamSlices:
        """Return the tensors that the inner optimizer steps."""
        return self.executor.slices

    @property
    def loss_scale(self) -> float:
        return self.scale.value

    @property
    def overflow(self) -> bool:
        """Whether the gradients of the last step that the host knows of were not finite."""
        return self._overflow_check.overflow

    def has_overflowed(self) -> bool:
        """Return whether the gradients of the last step were not finite. This waits for the device."""
        self._overflow_check.resolve()
        return self.overflow

    @property
    def skipped_steps(self) -> int:
        return self._overflow_check.num_skipped

    def resume_at(self, steps: int, skipped: int) -> None:
        """Set the counts of steps before this process: a resumed run has shown that it can step."""
        self._overflow_check.num_resolved, self._overflow_check.num_skipped = steps, skipped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the model that belong to no parameter group yet."""
        if "inner" not in self.__dict__:  # called by torch's own constructor, before any attribute exists
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        label = len(self.inner.param_groups)
        tensors = []
        for parameter in params:
            if not released.is_owned(parameter) and (engine := self.trainer()) is not None:
                engine.fit_to_model()  # the parameter may have been added after the last forward
            owner = released.owner_of(parameter) if released.is_owned(parameter) else None
            if not isinstance(owner, Unit):
                raise ShardwellError("add_param_group takes parameters of the model that was given to initialize")
            if self._factory.label(parameter) != NO_LABEL:
                raise ValueError("some parameters appear in more than one parameter group")
            self._factory.labels[id(parameter)] = label
            if owner in self.shards.units:
                owner.wait()
                with self.states_of(owner, changes=True):
                    tensors += [s.tensor for s in self.shards.relabel(owner, parameter, label, self.inner)]
        type(self.inner).add_param_group(self.inner, {**param_group, "params": tensors})

    # ----------------------------------------------------------------------------------------------------- step

    def step(self, closure: Any = None) -> Any:
        """Apply the gradients, as `Engine.step` does at a boundary."""
        return step_with(self.trainer(), closure)

    step.hooked = True  # type: ignore[attr-defined]  # else torch would run hooks here, and not in the engine's steps

    @torch.no_grad()
    def apply_gradients(self) -> None:
        """Apply the gradients of this boundary, and start to all-gather the updated parameters."""
        units = self.executor.slices.units
        for optimizer in (self, self.inner, self._factory.given):
            if optimizer is not None:  # torch warns of schedulers that are stepped before their optimizer
                optimizer._opt_called = True  # type: ignore[attr-defined]
        if self._scheduler.observer is not None:
            self._scheduler.observer.step_begins()
        self._scheduler.finish_backward()
        for unit in units:
            for group in unit.trainable:
                group.gradients.wait()
                if group.spec.secondary is not None:
                    group.invalidate_secondary()  # of all: updates before a failed step may differ by rank
        was_used: bool | Tensor = False
        together = False
        try:
            for unit in units:
                for group in unit.trainable:
                    if group.gradients.reduced.tensor is not None:
                        break
                else:
                    unit.wait()  # it was not used: nothing has waited for its last update yet
            self._overflow_check.resolve()
            norm = self._grad_norm(self.executor.norms())
            check_finite_options(self.inner, lambda: self.executor.describe_partial(is_late=False)[1])
            self._grad_norm.last = unscaled = norm / self.scale.value
            self._overflow_check.enqueue(norm)
            may_step = self._may_step(norm)
            if may_step:
                clip = clip_factor(unscaled, self._grad_norm.clip)
                with self._step_hooks():
                    for unit, pending in self.executor.step(norm, clip, self._grad_norm.unseen):
                        self._scheduler.after_update(unit, pending)
            else:
                self.executor.skip_step()
            # Where the kernels read the overflow flag on the device, the error feedback does so, too.
            was_used = torch.isfinite(norm) if self._overflow_check.pending is not None else may_step
            together = True
        except NonFiniteError:
            together = True
            raise
        finally:
            self.executor.drop_gradients(was_used, together=together)
        if self.scale.is_on:
            self.scale.update(self.overflow)
        if len(self.state) != self._num_states:  # torch allocates state at the first step
            self.count_states()

    @contextlib.contextmanager
    def _step_hooks(self) -> Iterator[None]:
        """Run the step hooks around a step, once, under the name that torch's profiler has for it.

        The inner `step` would run its hooks in each of its calls, of which there are several, or none. Hooks that are
        registered for all optimizers get the inner one.
        """
        inner, given = self.inner, self._factory.given
        hooked = [inner, self] if given is None or given is inner else [given, inner, self]
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(hooked[0]).__name__}.step"):
            for hook in list(_global_optimizer_pre_hooks.values()):
                if hook is not meet_foreign_step and (result := hook(inner, (inner,), {})) is not None:
                    _check_hook_result(result)
            for one in hooked:
                for hook in list(one._optimizer_step_pre_hooks.values()):
                    if (result := hook(one, (one,), {})) is not None:
                        _check_hook_result(result)
            yield
            for one in hooked:
                for after in list(one._optimizer_step_post_hooks.values()):
                    after(one, (one,), {})
            for after in list(_global_optimizer_post_hooks.values()):
                after(inner, (inner,), {})

    def _may_step(self, norm: Tensor) -> bool:
        """Return whether to update at all; where the kernels read the overflow flag, the host does not wait."""
        if self.executor.vetoes_on_device and not self.scale.is_on:
            self.inner.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
            return True
        return self._overflow_check.resolve(is_late=False)

    def settle(self, *, but_begun: bool = False) -> None:
        """Wait for the last step and raise its errors; `but_begun`: skip early "auto" updates, discarded soon."""
        for unit in self.shards.units:
            if not (but_begun and self.executor.is_updated_early(unit)):
                unit.wait()
        self._overflow_check.resolve()

    def sum_with_norm(self, *numbers: SummedNumber) -> None:
        """Sum these numbers over all ranks in the all-reduces of the norm, from the next step on."""
        self._grad_norm.sum_also(numbers)

    def global_norm(self) -> Tensor | None:
        """Return the norm of the full averaged gradient at the last step, before clipping."""
        return self._grad_norm.last

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as `Engine.zero_grad` does."""
        if (trainer := self.trainer()) is not None:
            trainer.zero_grad(set_to_none)

    def forget_gradients(self) -> None:
        """Drop the gradients of this boundary; an immediate update is not undone; with "auto" it is an error."""
        self.executor.gradients_dropped("gradients were dropped")
        self.executor.drop_gradients(False, together=True)

    def hide_slice_gradients(self) -> None:
        """Let a read of `grad` of the tensors in `param_groups` raise an error while the engine holds gradients."""
        for shards in self.executor.slices.by_unit.values():
            for shard in shards:
                shard.tensor.grad = shard.no_gradient

    # ---------------------------------------------------------------------------------------------------- state

    def states_of(self, unit: Unit, *, changes: bool = False) -> contextlib.AbstractContextManager[None]:
        """Have a unit's optimizer state swapped in; changes made inside are kept. The context may be nested."""
        return self.executor.state(unit, changes=changes)

    def part(self, unit: Unit, shard: ParamSlice) -> list[ParamSlice]:
        """Split a slice into its parameters, together with its state."""
        if len(shard.pieces) == 1:
            return [shard]
        with self.states_of(unit, changes=True):
            return self.shards.part(unit, shard, self.inner)

    def alone(self, unit: Unit, shard: ParamSlice, name: str) -> ParamSlice:
        """Return the slice of one parameter; a slice of several is split."""
        return next(part for part in self.part(unit, shard) if part.pieces[0].slot.name == name)

    def scalar(self, tensor: Tensor, before: Any, value: float) -> Any:
        """Return a scalar of the state of a slice as torch's optimizers keep it, see `scalar_state`."""
        return scalar_state(self.inner, tensor, before, value)

    def forget_state(self, shard: ParamSlice) -> None:
        """Reset the state of a slice to that before the first step."""
        self.state.pop(shard.tensor, None)
        if self._has_initial_state and shard.label >= 0:
            self._make_initial_state(shard)

    def _make_initial_state(self, shard: ParamSlice) -> None:
        options = {**self.param_groups[shard.label], "params": [shard.tensor]}
        self.state[shard.tensor] = type(self.inner)([options], **self.inner.defaults).state[shard.tensor]

    def count_states(self) -> None:
        """Update the memory statistics when the optimizer state has grown."""
        if len(self.state) == self._num_states:
            return
        self._num_states = len(self.state)
        for unit in self.shards.units:
            for tier, size in bytes_of_state(unit, self.shards, self.state).items():
                self._context.memory_stats.set(StateKind.OPTIMIZER, unit.name, tier, size)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, in the format of the inner torch optimizer."""
        for unit in self.shards.units:
            unit.wait_local_update()
        found = type(self.inner).state_dict(self.inner)
        numbers = {id(tensor): i for i, tensor in enumerate(t for g in self.param_groups for t in g["params"])}
        for tensor, state in self.executor.swapped_states():
            found["state"][numbers[id(tensor)]] = state
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` of the same rank, world size and stage. All ranks must call it."""
        for unit in self.shards.units:
            unit.wait()
        check_cut(self.inner, state_dict, self._context.roles.all)
        type(self.inner).load_state_dict(self.inner, state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.executor.adopt_states()

    # ---------------------------------------------------------------------------------------------------- units

    def enter(self, unit: Unit) -> None:
        """Add a unit that was rebuilt."""
        if not unit.trainable:
            return
        for shard in self.shards.enter(unit):
            if shard.label >= 0:
                self.param_groups[shard.label]["params"].append(shard.tensor)
                if self._has_initial_state:
                    self._make_initial_state(shard)
        self.executor.enter(unit)

    def leave(self, unit: Unit) -> None:
        """Remove a unit and its state."""
        self.executor.leave(unit)
        gone = {id(shard.tensor) for shard in self.shards.leave(unit)}
        for group in self.param_groups:
            group["params"] = [tensor for tensor in group["params"] if id(tensor) not in gone]
        for tensor in [tensor for tensor in self.state if id(tensor) in gone]:
            del self.state[tensor]
        for tier in Tier:
            masters = sum(group.master_bytes().get(tier, 0) for group in unit.groups)
            self._context.memory_stats.set(StateKind.OPTIMIZER, unit.name, tier, masters)
        self._num_states = -1


def _check_hook_result(result: Any) -> None:
    """Refuse arguments from a step pre-hook: `step` has only a closure."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise RuntimeError(f"a step pre-hook must return None or a tuple of (args, kwargs), but returned {result}")
    args, kwargs = result
    if any(value is not None for value in [*args[1:], *kwargs.values()]):
        raise ShardwellError(
            "a step pre-hook gave the step a closure: sharded optimizers evaluate one before the step begins. Call "
            "it before the step, or pass it to step()."
        )
