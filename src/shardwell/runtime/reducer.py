"""How gradients come in and are averaged: into flat buffers, over micro-steps and over ranks.

Autograd leaves a gradient in `p.grad`. It moves into the flat buffer of its group, and when the unit's backward is over
the buffer is reduced, one unit behind the next. What the user does to `p.grad` in between is done to what is held here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shardwell.errors import BackwardError
from shardwell.optim.gradient_views import GradientViews
from shardwell.optim.loss_scale import LossScale, NoScale
from shardwell.runtime.trace import TraceAction, profiled
from shardwell.sharding import ShardedGroup, Unit
from shardwell.sharding.spec import ReduceAt


class Reducer:
    """The gradients of one engine's units until the step."""

    def __init__(self, num_ranks: int, accumulation_steps: int, note: Callable[[TraceAction, Unit], None]) -> None:
        self.num_averaged = num_ranks  # that gradients are averaged over
        self.accumulation_steps = accumulation_steps
        self.is_boundary = True
        self.sync = True  # off inside no_sync
        self.paths_differ = False  # ranks may run different units: all are reduced at the boundary, in a fixed order
        self.is_ending = False  # that boundary is being ended
        self.divide_by_steps = True
        self.loss_scale: LossScale = NoScale()  # that gradients must carry
        self.has_met_scale = False  # some have, since the last forward
        self.views: GradientViews | None = None  # that stand for gradients in `p.grad`
        self._spends = False  # the step is of the user's own optimizer, which leaves `p.grad` where it is
        self.drop_gradients: Callable[[], None] = self.clear  # all of them, as `zero_grad` does
        self.reduced: Callable[[Unit, bool], None] | None = None  # whom to tell, and whether at the boundary
        self.kept_back = False  # some gradients of this boundary were
        self.in_flight: dict[ShardedGroup, bool] = {}  # on their way, and whether they are the boundary's
        self._sums_wait = False  # on some ranks, gradients of this boundary may not be averaged yet
        self._units: dict[str, Unit] = {}
        self._note = note

    def adopt_units(self, units: dict[str, Unit]) -> None:
        """Look after the gradients of these units, by name, from now on."""
        self._units = units
        if self.views is not None:
            self.views.take(list(units.values()))

    # -------------------------------------------------------------------------------------------------- coming in

    def incoming(self, group: ShardedGroup, index: int, parameter: Tensor) -> Tensor | None:
        """What a backward has just brought a parameter; None if that was nothing."""
        grad = parameter.grad
        if grad is not None and self.views is not None:
            grad = self.views.take_incoming(group, index, grad)
        if grad is not None and self.loss_scale.is_on and not self.has_met_scale:
            raise BackwardError(
                "these gradients did not come through the model's outputs as the engine returned them, so they lack "
                "the fp16 loss scale: an output was changed in place, or returned in a container that shardwell does "
                "not look into. Use engine.backward(loss)."
            )
        return grad

    def meet_scale(self) -> None:
        """Gradients of the running backward carry the loss scale."""
        self.has_met_scale = True

    def accumulate(self, unit: Unit, group: ShardedGroup, index: int, parameter: Tensor, grad: Tensor) -> None:
        """Move a gradient into the group's flat buffer."""
        if torch.is_grad_enabled() or grad.requires_grad:  # only where the backward keeps a graph: this costs
            with torch.no_grad():
                self._add(group, index, grad.detach(), self._scale)
        else:
            self._add(group, index, grad, self._scale)
        if self.views is not None:
            self.views.hang_one(group, index)
        else:
            parameter.grad = None
        unit.has_news = True

    def _add(self, group: ShardedGroup, index: int, grad: Tensor, scale: float) -> None:
        is_last = self.is_boundary and self.sync
        group.gradients.accumulate(index, grad, scale, stays=self._adds_up(group), is_last=is_last)

    def set_gradient(self, unit: Unit, group: ShardedGroup, index: int, grad: Tensor) -> None:
        """A gradient that the user set counts as one of this rank's: it is averaged over the ranks."""
        self._add(group, index, grad.clone(), self.loss_scale.value / self.num_averaged)
        unit.has_news = self._sums_wait = True

    @property
    def _scale(self) -> float:
        """What makes a sum over ranks and micro-steps their average."""
        return 1.0 / (self.num_averaged * (self.accumulation_steps if self.divide_by_steps else 1))

    def _adds_up(self, group: ShardedGroup) -> bool:
        """Whether gradients of several micro-steps meet here before they are reduced.

        They then do so in the dtype for that, also on a rank whose first gradient comes with the last micro-step: what
        travels must be alike on all ranks.
        """
        if self.paths_differ:
            return self.accumulation_steps > 1 or self.kept_back
        over_steps = self.accumulation_steps > 1 and group.row.reduce_at is ReduceAt.BOUNDARY
        return over_steps or self.kept_back or not self._reduces_now(group)

    def defer_reduction(self) -> None:
        """Gradients are kept back, by `no_sync` or before a boundary that the user decides on."""
        self.kept_back = True

    # --------------------------------------------------------------------------------------------------- reducing

    def _reduces_now(self, group: ShardedGroup) -> bool:
        if self.paths_differ:
            return self.is_ending
        return self.sync and (self.is_boundary or group.row.reduce_at is ReduceAt.MICRO_STEP)

    def reduce(self, unit: Unit) -> None:
        """Start to average what a unit holds, if it is the time for that."""
        for group in unit.trainable:
            if self._reduces_now(group):
                self._reduce(unit, group)

    def _reduce(self, unit: Unit, group: ShardedGroup) -> None:
        self.finish(self._reduced_before(group))
        self._note(TraceAction.REDUCE, unit)
        by_steps = group.row.reduce_at is ReduceAt.MICRO_STEP and not self.paths_differ
        accumulates = self.accumulation_steps > 1 and by_steps
        with torch.no_grad(), profiled("REDUCE", unit.name):
            group.gradients.reduce_scatter(
                self._scale,
                stays=self._adds_up(group),
                accumulates=accumulates,
                loss_scale=self.loss_scale.value,
            )
        self.in_flight[group] = self.is_boundary and self.sync

    def _reduced_before(self, group: ShardedGroup) -> list[ShardedGroup]:
        """What to finish before a group's reduce.

        One unit is in flight while the next one's gradients fill: finish the one before, its buffers are next. One that
        has a hop to go, which the host begins, goes on beside the unit after that.
        """
        units: dict[str, list[ShardedGroup]] = {}
        for other in self.in_flight:
            if other.unit != group.unit:
                units.setdefault(other.unit, []).append(other)
        with torch.no_grad():
            goes_on = {name: [other.gradients.start_next_hop() for other in others] for name, others in units.items()}
        return [other for name, others in units.items() if not any(goes_on[name]) for other in others]

    def finish(self, groups: list[ShardedGroup]) -> None:
        """Wait for these, and tell who waits for whole units."""
        reduced: dict[str, bool] = {}
        with torch.no_grad():
            for group in groups:
                group.gradients.finish()
                reduced[group.unit] = self.in_flight.pop(group)
        if self.reduced is not None:
            for name, at_boundary in reduced.items():
                self.reduced(self._units[name], at_boundary)

    def finish_all(self) -> None:
        self.finish(list(self.in_flight))

    def finish_earlier(self) -> None:
        """What micro-steps before the boundary left on its way."""
        self.finish([group for group, at_boundary in self.in_flight.items() if not at_boundary])

    def finish_larger(self, numel: int) -> None:
        """What is larger than the unit that runs next (a head before the blocks) would make the peak if it waited."""
        large = {group.unit for group in self.in_flight if group.layout.padded > numel > 0}
        self.finish([group for group in self.in_flight if group.unit in large])

    def reduce_now(self, unit: Unit) -> None:
        """Average what a unit's gradients are so far, for who will change them. More may be added: no update begins."""
        for group in unit.trainable:
            self._reduce(unit, group)
            self.in_flight[group] = False
        self.finish(unit.trainable)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """The boundary ends: what was kept back until now is reduced inside."""
        sync, boundary = self.sync, self.is_boundary
        self.sync = self.is_boundary = self.is_ending = True
        try:
            yield
        finally:
            self.sync, self.is_boundary, self.is_ending = sync, boundary, False
            self.end_boundary()

    @contextlib.contextmanager
    def telling_nobody(self) -> Iterator[None]:
        """What is reduced inside is not wanted any more."""
        told, self.reduced = self.reduced, None
        try:
            yield
        finally:
            self.reduced = told

    def end_boundary(self) -> None:
        """All is averaged, or dropped."""
        self.kept_back = self._sums_wait = False

    # ----------------------------------------------------------------------------------- what the user does to them

    def sums_may_wait(self) -> bool:
        """Some rank may have gradients that are not averaged yet; the same answer on all ranks."""
        return self._sums_wait

    def begin_backward(self, *, has_begun: bool = False) -> None:
        """What stands for gradients makes room for those that autograd will bring, or has begun to."""
        if self.views is not None:
            with torch.no_grad():
                self.views.unhang(has_begun=has_begun)

    def end_task(self) -> None:
        """A graph task ended."""
        self._sums_wait = self._sums_wait or self.paths_differ or not (self.sync and self.is_boundary)

    def hang(self) -> None:
        """No backward runs: what the engine holds are the gradients of the parameters."""
        if self.views is not None:
            self.views.hang()

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """A step of the user's own optimizer."""
        self._spends = True
        try:
            yield
        finally:
            self._spends = False

    def clear(self) -> None:
        """The engine holds no gradients any more."""
        if self.views is not None and self._spends:
            self.views.spend()
        elif self.views is not None:
            self.views.clear()

    def forget(self) -> None:
        """Drop all gradients; nothing is on its way."""
        for unit in self._units.values():
            for group in unit.trainable:
                group.gradients.clear()
        self.clear()

    def zero(self) -> bool:
        """Set gradients to zero in place; false if nothing stands for them."""
        if self.views is not None:
            with torch.no_grad():
                self.views.zero()
        return self.views is not None

    def take_edits(self, *, at_step: bool = False) -> None:
        """Do what the user did to `p.grad`."""
        if self.views is not None:
            with torch.inference_mode(False), torch.no_grad():  # what is made here a later backward adds to
                self.views.take_edits(at_step=at_step)
