"""The optimizer that the user holds: a torch optimizer over this rank's shards.

It adds norm, clipping and overflow check. It steps a few units at a time, so that fp32 master weights that exist only
during a step stay small, and so that updated units are all-gathered while the next ones are stepped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell.errors import NonFiniteError, ShardwellError
from shardwell.memory import StateKind, Tier
from shardwell.offload.early_update import EarlyUpdates, UnpublishedUnits, commit_of
from shardwell.offload.host_executor import HostExecutor, host_updates
from shardwell.offload.host_updates import HostPending
from shardwell.offload.optimizer_swap import OptimizerSwapper
from shardwell.optim.auto_commit import AutoCommit
from shardwell.optim.factory import NO_LABEL, OptimizerFactory
from shardwell.optim.full_tensors import ShardedFullTensors, needs_full_tensors
from shardwell.optim.grad_norm import GradNorm, Norm, clip_factor, norm_of, sum_of_squares
from shardwell.optim.loss_scale import LossScale
from shardwell.optim.overflow_check import NonfiniteNorm, OverflowCheck
from shardwell.optim.param_slices import ParamSlice, ParamSlices, SliceStates, bytes_of_state, check_cut, chunks
from shardwell.optim.step_hooks import StepHooks
from shardwell.optim.user_optimizer import OwningOptimizer, step_with
from shardwell.sharding import EngineContext, ShardedGroup, Unit, released
from shardwell.sharding.edits import look_before_step
from shardwell.sharding.spec import CommitPolicy


@dataclass(frozen=True)
class StepOptions:
    """The settings of all optimizer steps."""

    scale: LossScale
    clip: float = 0.0  # the largest norm of the gradients; 0: no clipping
    nonfinite: NonfiniteNorm = NonfiniteNorm.AUTO
    buffer_count: int = 4  # pinned staging buffers for gradients, and update buffers for state on disk
    eight_bit_moments: bool = False  # Adam's moments on the host


class ShardedOptimizer(Optimizer):
    """An optimizer over this rank's shards; its `param_groups` are those of the inner one, so schedulers attach."""

    inner: Optimizer

    def __init__(
        self,
        recipe: OptimizerFactory,
        units: Sequence[Unit],
        context: EngineContext,
        *,
        terms: StepOptions,
        before_step: Callable[[], None],
        look_again: Callable[[], None],
        after_update: Callable[[Unit, HostPending | None], None],
    ) -> None:
        super().__init__([torch.zeros(0)], {})
        self._recipe = recipe
        self._units = [unit for unit in units if unit.trainable]
        self._context = context
        self._terms, self._clip, self.scale = terms, terms.clip, terms.scale
        self._before_step, self._look_again, self._after_update = before_step, look_again, after_update
        self.trainer: Callable[[], OwningOptimizer | None] = lambda: (
            None
        )  # the engine whose `step` and `zero_grad` are called
        self.shards = ParamSlices(self._units, one_per_parameter=False)
        self.inner = self._make()
        if needs_full_tensors(self.inner):  # a tensor must not span several parameters
            self.shards = ParamSlices(self._units, one_per_parameter=True)
            self.inner = self._make()
            self.inner.whole = ShardedFullTensors(self.shards, self.inner, context.world)  # type: ignore[attr-defined]
        self.inner.state = SliceStates(dict, self.inner.state)
        self.defaults, self.param_groups, self.state = self.inner.defaults, self.inner.param_groups, self.inner.state
        self._has_state_at_birth = bool(self.state)  # as Adagrad has
        self._hooks = StepHooks(self, recipe.given)
        self.habit = AutoCommit(self.inner, context, self._units)
        self._norm: Tensor | None = None
        self._global_norm = GradNorm(context, self.shards, self.inner)
        self._verdict = OverflowCheck(context, self.shards, self.scale, policy=terms.nonfinite)
        self._num_states = -1
        self._store: OptimizerSwapper | None = None
        if context.disk is not None:
            self._store = OptimizerSwapper(context.disk, self.inner, self.shards, context, terms.buffer_count)
            for unit in self._units:
                self._store.take_in(unit)
        self._offloaded = self._make_offloaded()
        self._ahead = EarlyUpdates(self.inner, context.scratch, self._stepped_here, self._update_ahead)
        by_host = [] if self._offloaded is None else [self._offloaded.host.take_back]
        self._unpublished = UnpublishedUnits([self._ahead.take_back, *by_host], self.habit)

    def _make(self) -> Optimizer:
        labels = range(1 + max(self._recipe.labels.values(), default=0))
        return self._recipe.make([[s.tensor for s in self.shards if s.label == label] for label in labels])

    def _make_offloaded(self) -> HostExecutor | None:
        terms, context = self._terms, self._context
        eight_bits = terms.eight_bit_moments
        host = host_updates(self.inner, self._units, context, terms.buffer_count, self._store, eight_bits=eight_bits)
        return None if host is None else HostExecutor(host, self.inner, self.shards, context, self.scale, self._clip)

    def _is_stepped_here(self, group: ShardedGroup) -> bool:
        """Whether the inner torch optimizer steps the group, on the current stream."""
        return self._offloaded is None or not group.is_stepped_on_host

    def _stepped_here(self, unit: Unit) -> list[ParamSlice]:
        return [shard for shard in self.shards.of(unit) if self._is_stepped_here(shard.group)]

    @property
    def optimizer(self) -> Optimizer:
        """Return the inner torch optimizer."""
        return self.inner

    @property
    def loss_scale(self) -> float:
        return self.scale.value

    @property
    def overflow(self) -> bool:
        """Whether the gradients of the last step that the host knows of were not finite."""
        return self._verdict.overflow

    @property
    def skipped_steps(self) -> int:
        return self._verdict.num_skipped

    def resume_at(self, steps: int, skipped: int) -> None:
        """Set the counts of steps before this process: a resumed run has shown that it can step."""
        self._verdict.num_heard, self._verdict.num_skipped = steps, skipped

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
            if not released.is_owned(parameter):
                self._look_again()  # at the model: the parameter may have been added after the last forward
            keeper = released.owner_of(parameter) if released.is_owned(parameter) else None
            if not isinstance(keeper, Unit):
                raise ShardwellError("add_param_group takes parameters of the model that was given to initialize")
            if self._recipe.label(parameter) != NO_LABEL:
                raise ValueError("some parameters appear in more than one parameter group")
            self._recipe.labels[id(parameter)] = label
            if keeper in self._units:
                keeper.wait()
                with self.states_of(keeper, changes=True):
                    tensors += [s.tensor for s in self.shards.relabel(keeper, parameter, label, self.inner)]
        self.inner.add_param_group({**param_group, "params": tensors})

    def step(self, closure: Any = None) -> Any:
        """Apply the gradients, as `Engine.step` does at a boundary."""
        return step_with(self.trainer(), closure)

    step.hooked = True  # type: ignore[attr-defined]  # else torch would run hooks here, and not in the engine's steps

    @torch.no_grad()
    def apply_gradients(self) -> None:
        """Apply the gradients of this boundary, and start to all-gather the updated parameters."""
        look_before_step(self._units)
        self._recipe.note_step(self, self.inner)
        self.habit.begin_step()
        self._before_step()
        for unit in self._units:
            for group in unit.trainable:
                group.gradients.wait()
                group.invalidate_secondary()  # all: updates before a failed step may differ by rank
        was_used: bool | Tensor = False
        together = False
        try:
            for unit in self._units:
                if all(group.gradients.result is None for group in unit.trainable):
                    unit.wait()  # it was not used: nothing has waited for its last update yet
            self._verdict.hear()
            norm = self._global_norm(self._units, self._norms_of, self.habit.says)
            self.habit.hear(self._global_norm.told)
            self._norm = norm / self.scale.value
            self._verdict.ask(self._units, norm, self._norms_at_once)
            may_step = self._may_step(norm)
            clip = clip_factor(self._norm, self._clip)
            with self._hooks.around() if may_step else contextlib.nullcontext():
                self.habit.check_options()
                done = self._ahead.commit(may_step, clip)
                if may_step:
                    self._apply(norm, clip, done)
            self.habit.end_step()
            # Where the kernels read the overflow flag on the device, the error feedback does so, too.
            was_used = torch.isfinite(norm) if self._verdict.is_open else may_step
            together = True
        except NonFiniteError:
            together = True
            raise
        finally:
            self._forget_gradients(was_used, together=together)
        if self.scale.is_on:
            self.scale.update(self.overflow)
        self.count_states()

    def _apply(self, norm: Tensor, clip: Tensor | None, done: set[int]) -> None:
        """Update all units except those in `done`, and start to all-gather them."""
        to_step = partial(self._to_step, unseen=self._global_norm.unseen)
        for unit in () if self._offloaded is None else self._offloaded.step(self._units, norm, to_step):
            self._unpublished.add(unit, self._arrival(unit))
        for chunk in chunks(self._units):
            self._update([unit for unit in chunk if unit.index not in done], clip)
            for unit in chunk:
                self._unpublished.remove(unit)
                self._after_update(unit, self._arrival(unit))

    def settle(self, *, but_begun: bool = False) -> None:
        """Wait for the last step and raise its errors; `but_begun`: skip early "auto" updates, discarded soon."""
        for unit in (unit for unit in self._units if not (but_begun and self.habit.has_begun(unit))):
            unit.wait()
        self._verdict.hear()

    def states_of(self, unit: Unit, *, changes: bool = False) -> contextlib.AbstractContextManager[None]:
        """Have a unit's optimizer state swapped in; changes made inside are kept. The context may be nested."""
        return contextlib.nullcontext() if self._store is None else self._store.opened(unit, changes=changes)

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
        """Return a scalar of a state as torch's optimizers keep it: a tensor, on the device for their fused kernels."""
        if before is not None and not isinstance(before, Tensor):
            return type(before)(value) if isinstance(before, int) else value
        on_device = self.inner.defaults.get("fused") or self.inner.defaults.get("capturable")
        dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
        return torch.tensor(value, dtype=dtype, device=tensor.device if on_device else "cpu")

    def packed(self, shard: ParamSlice, state: dict[str, Any]) -> dict[str, Any]:
        """Convert the state of a slice from torch's format to the stored format."""
        if self._offloaded is None or not shard.group.is_stepped_on_host:
            return state
        return self._offloaded.host.kernel.packed(state)

    def forget_state(self, shard: ParamSlice) -> None:
        """Reset the state of a slice to that before the first step."""
        self.state.pop(shard.tensor, None)
        if self._has_state_at_birth and shard.label >= 0:
            self._give_birth_state(shard)

    def _give_birth_state(self, shard: ParamSlice) -> None:
        options = {**self.param_groups[shard.label], "params": [shard.tensor]}
        self.state[shard.tensor] = type(self.inner)([options], **self.inner.defaults).state[shard.tensor]

    def enter(self, unit: Unit) -> None:
        """Add a unit that was rebuilt."""
        if not unit.trainable:
            return
        self._units = sorted([*self._units, unit], key=lambda other: other.index)
        self.habit.take(unit)
        if self._offloaded is not None:
            self._offloaded.host.descent.enter(unit)
        for shard in self.shards.enter(unit):
            if shard.label >= 0:
                self.param_groups[shard.label]["params"].append(shard.tensor)
                if self._has_state_at_birth:
                    self._give_birth_state(shard)
        if self._store is not None:
            self._store.take_in(unit)

    def leave(self, unit: Unit) -> None:
        """Remove a unit and its state."""
        self.habit.leave(unit)
        if self._offloaded is not None:
            self._offloaded.leave(unit)
        if self._store is not None:
            self._store.forget(unit)
        self._units = [other for other in self._units if other is not unit]
        gone = {id(shard.tensor) for shard in self.shards.leave(unit)}
        for group in self.param_groups:
            group["params"] = [tensor for tensor in group["params"] if id(tensor) not in gone]
        for tensor in [tensor for tensor in self.state if id(tensor) in gone]:
            del self.state[tensor]
        for tier in Tier:
            masters = sum(group.master_bytes().get(tier, 0) for group in unit.groups)
            self._context.account.set(StateKind.OPTIMIZER, unit.name, tier, masters)
        self._num_states = -1

    def gradients_reduced(self, unit: Unit, at_boundary: bool) -> None:
        """Handle averaged gradients of a unit; at a boundary, update units whose commit policy needs no norm."""
        if self._offloaded is not None:
            self._offloaded.host.descent.add_up(unit)
        if not at_boundary:
            return
        goes_ahead = commit_of(unit) is not CommitPolicy.AFTER_NORM
        for group in unit.trainable if goes_ahead or self._offloaded is not None else ():
            group.gradients.wait()  # full gradients may still be in their all-gather
        is_complete = not unit.in_backward and all(group.gradients.is_complete for group in unit.trainable)
        if self._offloaded is not None:
            self._offloaded.take(unit, is_complete=is_complete)
        if is_complete:
            self._ahead.update(unit)
        self._unpublished.begin(unit, self._arrival(unit), is_complete=is_complete)

    def gradients_change(self, unit: Unit) -> None:
        """Prepare for a change of a unit's gradients by the user before the step."""
        self.habit.see_gradients(unit)
        self._unpublished.take_back(unit)
        if self._offloaded is not None:
            self._offloaded.gradients_change(unit)

    def _arrival(self, unit: Unit) -> HostPending | None:
        return None if self._offloaded is None else self._offloaded.host.arrival(unit)

    def move_up(self, free: float) -> list[str]:
        """Move the state of the first units to the device, as much as fits into `free` bytes; return their names.

        Their updates would be the last on the host, and the next forward needs them first.
        """
        moved = []
        for unit in self._units if self._offloaded is not None else ():
            assert self._offloaded is not None
            needed = self._offloaded.bytes_above(unit)
            free -= needed
            if free < 0:
                break
            if needed:
                self._offloaded.move_up(unit, self.scalar)
                self.habit.leave(unit)
                moved.append(unit.name)
        self._num_states = -1
        self.count_states()
        return moved

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as `Engine.zero_grad` does."""
        if (trainer := self.trainer()) is not None:
            trainer.zero_grad(set_to_none)

    def forget_gradients(self) -> None:
        """Drop the gradients of this boundary; an immediate update is not undone; with "auto" it is an error."""
        self.habit.meet("gradients were dropped")
        self._forget_gradients(False, together=True)

    def _forget_gradients(self, was_used: bool | Tensor, *, together: bool) -> None:
        """Drop the gradients; with `together`, all ranks do so, and continue."""
        self._ahead.forget_gradients()
        self._unpublished.give_up(self._offloaded.give_up if self._offloaded else self._arrival, together=together)
        if self._offloaded is not None:
            self._offloaded.forget_gradients()
        for unit in self._units:
            for group in unit.trainable:
                group.gradients.clear(was_used)
        self.shards.hang_no_gradients(False)
        self.habit.forget()

    def global_norm(self) -> Tensor | None:
        """Return the norm of the full averaged gradient at the last step, before clipping."""
        return self._norm

    # ---------------------------------------------------------------------------------------- norm and overflow

    def _norms_of(self, unit: Unit) -> Iterator[tuple[Tensor, bool]]:
        """Yield the norms of a unit's gradients on this rank, each with whether every rank has the same."""
        gone = self._offloaded is not None and self._offloaded.has_norms(unit)
        if self._offloaded is not None:
            yield from self._offloaded.norms(unit)
        ahead = self._ahead.norms.get(unit.index)
        yield from ahead or ()
        for shard in self.shards.of(unit):
            was_counted = gone if shard.group.is_stepped_on_host and self._offloaded is not None else ahead is not None
            if shard.gradient is not None and not was_counted:
                shard.group.gradients.ensure_readable()  # it may be a sum that the host is still computing
                norm, is_whole = norm_of(shard)
                yield norm.to(self._context.device.torch_device), is_whole

    def _may_step(self, norm: Tensor) -> bool:
        """Whether to update at all; where the kernels read the overflow flag on the device, the host does not wait."""
        device = self._context.device
        if device.is_meta:
            return True
        is_all_on_host = all(not self._is_stepped_here(g) for unit in self._units for g in unit.trainable)
        if (self._can_veto or (device.is_cuda and is_all_on_host)) and not self.scale.is_on:
            self.inner.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
            return True
        return self._verdict.hear(is_late=False)

    def _norms_at_once(self, unit: Unit, shard: ParamSlice) -> list[Norm] | None:
        """Return the norms that allow an immediate update of a slice if they are finite; None if it waits."""
        if self._offloaded is not None and shard.group.is_stepped_on_host:
            return self._offloaded.norms_at_once(unit)
        norms = self._ahead.norms.get(unit.index)
        return None if norms is None else [norm for norm, _ in norms]

    # ------------------------------------------------------------------------------------------------ the update

    def _update_ahead(self, unit: Unit) -> None:
        """Update a unit before the norm is known, unless its own gradients are not finite."""
        norms = self._ahead.norms.get(unit.index)
        if norms is not None and not self._context.device.is_meta:
            is_finite = torch.isfinite(sum_of_squares([norm for norm, _ in norms], self._context.device))
            if self._can_veto:
                self.inner.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
            elif not bool(is_finite):
                return
        self._update([unit], None, ahead=True)

    @property
    def _can_veto(self) -> bool:
        """Whether the kernels can skip an update by a flag on the device."""
        return self._context.device.is_cuda and bool(self.inner.defaults.get("fused"))

    def _update(self, units: list[Unit], clip: Tensor | None, *, ahead: bool = False) -> None:
        """Update units; `ahead`: all have gradients on this rank, and those of other ranks are not known yet."""
        unseen = set() if ahead else self._global_norm.unseen
        groups = [
            group
            for unit in units
            for group in unit.trainable
            if group.gradients.result is not None and self._is_stepped_here(group)
        ]
        if not groups:
            return
        whole = getattr(self.inner, "whole", None)
        if isinstance(whole, ShardedFullTensors):
            whole.begin(groups, unseen)
        with contextlib.ExitStack() as stack:
            for group in groups:
                stack.enter_context(group.open_master(changes=True))
            shards = [s for unit in units for s in self._to_step(unit, unseen) if self._is_stepped_here(s.group)]
            self._step_inside(shards, clip, again=ahead)

    def _step_inside(self, shards: list[ParamSlice], clip: Tensor | None, *, again: bool) -> None:
        """Step these slices, and nothing else, with the inner torch optimizer."""
        every = [group["params"] for group in self.param_groups]
        factor = clip if self.scale.value == 1.0 else (1.0 if clip is None else clip) / self.scale.value
        try:
            for label, param_group in enumerate(self.param_groups):
                mine = [shard for shard in shards if shard.label == label]
                param_group["params"] = [shard.tensor for shard in mine if shard.hang_gradient(factor, again=again)]
            self._hooks.step()
        finally:
            for param_group, tensors in zip(self.param_groups, every, strict=True):
                param_group["params"] = tensors
            for shard in shards:
                shard.tensor.grad = None

    def _to_step(self, unit: Unit, unseen: set[str]) -> Iterator[ParamSlice]:
        """Yield the slices whose parameters have a gradient on any rank; one that has so in part is split for good."""
        for shard in list(self.shards.of(unit)):
            are_unseen = [piece.slot.name in unseen for piece in shard.pieces]
            if not any(are_unseen):
                yield shard
            elif not all(are_unseen):
                for part in self.part(unit, shard):
                    if part.pieces[0].slot.name not in unseen:
                        yield part

    def count_states(self) -> None:
        """Update the memory statistics when the optimizer state has grown (torch allocates it at the first step)."""
        if len(self.state) == self._num_states:
            return
        self._num_states = len(self.state)
        for unit in self._units:
            for tier, size in bytes_of_state(unit, self.shards, self.state).items():
                self._context.account.set(StateKind.OPTIMIZER, unit.name, tier, size)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, in the format of the inner torch optimizer."""
        for unit in self._units:
            unit.wait_local_update()
        found = type(self.inner).state_dict(self.inner)
        numbers = {id(tensor): i for i, tensor in enumerate(t for g in self.param_groups for t in g["params"])}
        for tensor, state in self._store.copies(self._units) if self._store is not None else ():
            found["state"][numbers[id(tensor)]] = state
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` of the same rank, world size and stage. All ranks must call it."""
        for unit in self._units:
            unit.wait()
        check_cut(self.inner, state_dict, self._context.world)
        type(self.inner).load_state_dict(self.inner, state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        if self._store is not None:
            self._store.take_over(self._units)
