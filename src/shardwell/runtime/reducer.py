"""The reducer of an engine: accumulates gradients in flat buffers and averages them over micro-steps and ranks.

Autograd leaves a gradient in `p.grad`. The reducer moves it into the flat buffer of its group, and when the unit's
backward is over it starts the buffer's reduce-scatter, which overlaps with the backward of the next unit. What the user
does to `p.grad` in between is applied to the gradients held here.
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
        self.num_averaged = num_ranks  # ranks that gradients are averaged over
        self.accumulation_steps = accumulation_steps
        self.is_boundary = True
        self.sync = True  # False inside no_sync
        self.paths_differ = False  # ranks may run different units: all are reduced at the boundary, in a fixed order
        self.is_ending = False  # such a boundary is being finished
        self.divide_by_steps = True
        self.loss_scale: LossScale = NoScale()  # the scale that gradients must carry
        self.has_met_scale = False  # some gradients carry it, since the last forward
        self.views: GradientViews | None = None  # stand for gradients in `p.grad`
        self._spends = False  # the user's own optimizer steps, which leaves `p.grad` set
        self.drop_gradients: Callable[[], None] = self.clear  # drops all of them, as `zero_grad` does
        self.reduced: Callable[[Unit, bool], None] | None = None  # called with a unit, and whether at the boundary
        self.kept_back = False  # some gradients of this boundary were deferred
        self.in_flight: dict[ShardedGroup, bool] = {}  # reductions in flight, and whether they are the boundary's
        self._sums_wait = False  # on some ranks, gradients of this boundary may not be averaged yet
        self._units: dict[str, Unit] = {}
        self._note = note

    def adopt_units(self, units: dict[str, Unit]) -> None:
        """Reduce the gradients of these units, by name, from now on."""
        self._units = units
        if self.views is not None:
            self.views.take(list(units.values()))

    # ----------------------------------------------------------------------------------------------- accumulation

    def incoming(self, group: ShardedGroup, index: int, parameter: Tensor) -> Tensor | None:
        """Return the gradient that a backward has just added to a parameter; None if there is none."""
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
        """Note that the gradients of the running backward carry the loss scale."""
        self.has_met_scale = True

    def accumulate(self, unit: Unit, group: ShardedGroup, index: int, parameter: Tensor, grad: Tensor) -> None:
        """Move a gradient into the group's flat buffer."""
        if torch.is_grad_enabled() or grad.requires_grad:  # only where the backward keeps a graph: no_grad has a cost
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
        """Accumulate a gradient that the user set, as one of this rank: it is averaged over the ranks."""
        self._add(group, index, grad.clone(), self.loss_scale.value / self.num_averaged)
        unit.has_news = self._sums_wait = True

    @property
    def _scale(self) -> float:
        """Return the factor that makes a sum over ranks and micro-steps their average."""
        return 1.0 / (self.num_averaged * (self.accumulation_steps if self.divide_by_steps else 1))

    def _adds_up(self, group: ShardedGroup) -> bool:
        """Return whether gradients of several micro-steps are accumulated here before they are reduced.

        They are then accumulated in the accumulation dtype, also on a rank whose first gradient comes with the last
        micro-step: the dtype on the wire must be the same on all ranks.
        """
        if self.paths_differ:
            return self.accumulation_steps > 1 or self.kept_back
        over_steps = self.accumulation_steps > 1 and group.row.reduce_at is ReduceAt.BOUNDARY
        return over_steps or self.kept_back or not self._reduces_now(group)

    def defer_reduction(self) -> None:
        """Note that gradients are deferred, by `no_sync` or before a boundary that the user decides on."""
        self.kept_back = True

    # -------------------------------------------------------------------------------------------------- reduction

    def _reduces_now(self, group: ShardedGroup) -> bool:
        if self.paths_differ:
            return self.is_ending
        return self.sync and (self.is_boundary or group.row.reduce_at is ReduceAt.MICRO_STEP)

    def reduce(self, unit: Unit) -> None:
        """Start to average the gradients of a unit's groups that are to be reduced now."""
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
        """Return the groups whose reduction must finish before the reduction of `group` starts.

        One unit is in flight while the next unit's gradients accumulate; the unit before is finished, and its buffers
        are reused. A unit with a second hop that the host has to start goes on during the unit after that.
        """
        units: dict[str, list[ShardedGroup]] = {}
        for other in self.in_flight:
            if other.unit != group.unit:
                units.setdefault(other.unit, []).append(other)
        with torch.no_grad():
            goes_on = {name: [other.gradients.start_next_hop() for other in others] for name, others in units.items()}
        return [other for name, others in units.items() if not any(goes_on[name]) for other in others]

    def finish(self, groups: list[ShardedGroup]) -> None:
        """Wait for the reduction of these groups, and call `reduced` for their units."""
        reduced: dict[str, bool] = {}
        with torch.no_grad():
            for group in groups:
                group.gradients.finish()
                reduced[group.unit] = self.in_flight.pop(group)
        if self.reduced is not None:
            for name, at_boundary in reduced.items():
                self.reduced(self._units[name], at_boundary)

    def finish_all(self) -> None:
        """Wait for all reductions in flight."""
        self.finish(list(self.in_flight))

    def finish_earlier(self) -> None:
        """Wait for reductions that micro-steps before the boundary left in flight."""
        self.finish([group for group, at_boundary in self.in_flight.items() if not at_boundary])

    def finish_larger(self, numel: int) -> None:
        """Wait for units larger than the one that runs next (a head before the blocks), which would make the peak."""
        large = {group.unit for group in self.in_flight if group.layout.padded > numel > 0}
        self.finish([group for group in self.in_flight if group.unit in large])

    def reduce_now(self, unit: Unit) -> None:
        """Average a unit's gradients so far, for a caller that will change them. More may come: no update starts."""
        for group in unit.trainable:
            self._reduce(unit, group)
            self.in_flight[group] = False
        self.finish(unit.trainable)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Finish the boundary: deferred gradients are reduced inside."""
        sync, boundary = self.sync, self.is_boundary
        self.sync = self.is_boundary = self.is_ending = True
        try:
            yield
        finally:
            self.sync, self.is_boundary, self.is_ending = sync, boundary, False
            self.end_boundary()

    @contextlib.contextmanager
    def telling_nobody(self) -> Iterator[None]:
        """Call `reduced` for nothing that is reduced inside, because it is dropped."""
        told, self.reduced = self.reduced, None
        try:
            yield
        finally:
            self.reduced = told

    def end_boundary(self) -> None:
        """Note that all gradients of the boundary are averaged, or dropped."""
        self.kept_back = self._sums_wait = False

    # -------------------------------------------------------------------------------------------- edits by the user

    def sums_may_wait(self) -> bool:
        """Return whether a rank may have gradients that are not averaged yet; the answer is the same on all ranks."""
        return self._sums_wait

    def begin_backward(self, *, has_begun: bool = False) -> None:
        """Take gradient views out of `p.grad` before autograd adds gradients, or when it has just begun to."""
        if self.views is not None:
            with torch.no_grad():
                self.views.unhang(has_begun=has_begun)

    def end_task(self) -> None:
        """Note that a graph task has ended."""
        self._sums_wait = self._sums_wait or self.paths_differ or not (self.sync and self.is_boundary)

    def hang(self) -> None:
        """Put gradient views into `p.grad`: no backward runs, and the engine holds the parameters' gradients."""
        if self.views is not None:
            self.views.hang()

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Run a step of the user's own optimizer inside."""
        self._spends = True
        try:
            yield
        finally:
            self._spends = False

    def clear(self) -> None:
        """Tell the gradient views that the engine holds no gradients any more."""
        if self.views is not None and self._spends:
            self.views.spend()
        elif self.views is not None:
            self.views.clear()

    def forget(self) -> None:
        """Drop all gradients; no reduction may be in flight."""
        for unit in self._units.values():
            for group in unit.trainable:
                group.gradients.clear()
        self.clear()

    def zero(self) -> bool:
        """Set gradients to zero in place; return false if there are no gradient views."""
        if self.views is not None:
            with torch.no_grad():
                self.views.zero()
        return self.views is not None

    def take_edits(self, *, at_step: bool = False) -> None:
        """Apply what the user did to `p.grad`."""
        if self.views is not None:
            with torch.inference_mode(False), torch.no_grad():  # a later backward adds to tensors that are made here
                self.views.take_edits(at_step=at_step)
