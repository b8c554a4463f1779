"""The reducer of an engine: accumulates gradients in flat buffers and averages them over micro-steps and ranks.

Autograd leaves a gradient in `p.grad`. The reducer moves it into the flat buffer of its group, and when the unit's
backward is over it starts the buffer's reduce-scatter, which overlaps with the backward of the next unit. What the user
does to `p.grad` in between is applied to the gradients held here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwell.optim.gradient_views import GradientViews, NoGradientViews
from shardwell.optim.loss_scale import LossScale, NoScale
from shardwell.parallel.joined import Joined
from shardwell.parallel.traffic import TrafficKind
from shardwell.runtime.trace import NOT_PROFILED, Trace, TraceAction, is_profiling, profiled
from shardwell.sharding import ShardedGroup, Unit
from shardwell.sharding.spec import ReduceAt

_REDUCE = TrafficKind.REDUCE_SCATTER


@dataclass
class StepCounts:
    """The micro-steps, optimizer steps and samples of a training loop, and which micro-steps are boundaries."""

    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    accumulation_steps: int = 1
    samples_per_step: int = 1
    boundary: bool | None = None  # whether the next step is one, if the user has said so
    is_managed: bool = True  # boundaries are counted; otherwise each step is one, after any number of micro-steps
    num_backwards: int = 0  # since the last boundary

    @property
    def at_boundary(self) -> bool:
        """Whether the next step applies the gradients."""
        if self.boundary is not None:
            return self.boundary
        return (self.micro_steps + 1) % self.accumulation_steps == 0

    def end_boundary(self) -> None:
        """Count an optimizer step and its samples."""
        per_micro_step = self.samples_per_step // self.accumulation_steps
        self.global_steps += 1
        self.global_samples += self.samples_per_step if self.is_managed else per_micro_step * self.num_backwards
        self.num_backwards = 0


@dataclass(frozen=True)
class MicroStep:
    """The way in which gradients that arrive now are averaged. It is replaced when one of its conditions changes."""

    num_averaged: int  # ranks that gradients are averaged over
    accumulation_steps: int
    paths_differ: bool = False  # ranks may run different units: all are reduced at the boundary, in a fixed order
    is_boundary: bool = True
    syncs: bool = True  # False inside no_sync
    divides: bool = True  # by the accumulation steps
    sums: bool = False  # over the ranks, instead of averaging
    is_deferred: bool = False  # gradients of this boundary wait, for no_sync or for a boundary that the user decides on
    is_ending: bool = False  # the boundary is being finished

    scale: float = field(init=False)  # the factor that makes a sum over ranks and micro-steps their average
    at_boundary: bool = field(init=False)  # the step that follows applies the gradients
    reduces: tuple[ReduceAt, ...] = field(init=False)  # groups that are reduced at these times are reduced now
    # Groups that are reduced at these times accumulate several micro-steps on this rank before they are reduced. They
    # do so in the accumulation dtype, also on a rank whose first gradient comes with the last micro-step: the dtype on
    # the wire must be the same on all ranks.
    adds_up: tuple[ReduceAt, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Derive the values that are read with every gradient."""
        reduces, adds_up = [], []
        for time in ReduceAt:
            at_micro_step = time is ReduceAt.MICRO_STEP
            now = self.is_ending if self.paths_differ else self.syncs and (self.is_boundary or at_micro_step)
            over_steps = self.accumulation_steps > 1 and (self.paths_differ or not at_micro_step)
            if now:
                reduces.append(time)
            if over_steps or self.is_deferred or not (now or self.paths_differ):
                adds_up.append(time)
        object.__setattr__(self, "scale", 1.0 / (self.divisor * (self.accumulation_steps if self.divides else 1)))
        object.__setattr__(self, "at_boundary", self.is_boundary and self.syncs)
        object.__setattr__(self, "reduces", tuple(reduces))
        object.__setattr__(self, "adds_up", tuple(adds_up))

    @property
    def divisor(self) -> int:
        """The divisor of a sum over the ranks."""
        return 1 if self.sums else self.num_averaged


class Reducer:
    """The gradients of one engine's units until the step."""

    def __init__(self, micro_step: MicroStep) -> None:
        self.micro_step = micro_step
        self.trace: Trace | None = None
        self.loss_scale: LossScale = NoScale()  # the scale that gradients must carry
        self.is_scaled = False
        self.has_met_scale = False  # some gradients carry it, since the last forward
        self.views: GradientViews | NoGradientViews = NoGradientViews()  # stand for gradients in `p.grad`
        self.is_spending = False  # the user's own optimizer steps, which leaves `p.grad` set
        self.drop_gradients: Callable[[], None] = self.clear  # drops all of them, as `zero_grad` does
        self.reduced: Callable[[Unit, bool], None] | None = None  # called with a unit, and whether at the boundary
        self.in_flight: dict[ShardedGroup, bool] = {}  # reductions in flight, and whether they are the boundary's
        self.sums_wait = False  # on some ranks, gradients of this boundary may not be averaged yet
        self.units: dict[str, Unit] = {}
        self._starts_hops = False  # reductions have a second hop that the host starts

    def adopt_units(self, units: dict[str, Unit]) -> None:
        """Reduce the gradients of these units, by name, from now on."""
        self.units = units
        self._starts_hops = any(g.context.roles.shard.host_starts_hops for u in units.values() for g in u.trainable)
        self.views.take(list(units.values()))

    def average_over(self, num_ranks: int) -> None:
        """Average gradients over this number of ranks from now on."""
        self.micro_step = replace(self.micro_step, num_averaged=num_ranks)

    def accumulate_over(self, num_steps: int) -> None:
        """Average gradients over this number of micro-steps from now on."""
        self.micro_step = replace(self.micro_step, accumulation_steps=num_steps)

    def use_loss_scale(self, scale: LossScale) -> None:
        """Expect gradients that carry this scale."""
        self.loss_scale, self.is_scaled = scale, scale.is_on

    def meet_scale(self) -> None:
        """Note that the gradients of the running backward carry the loss scale."""
        self.has_met_scale = True

    # ----------------------------------------------------------------------------------------------- accumulation

    def accumulate(self, unit: Unit, group: ShardedGroup, index: int, grad: Tensor, scale: float | None = None) -> None:
        """Move a gradient into the group's flat buffer, with the micro-step's scale or another one."""
        if torch.is_grad_enabled() or grad.requires_grad:  # only where the backward keeps a graph: no_grad has a cost
            with torch.no_grad():
                self.accumulate(unit, group, index, grad.detach(), scale)
            return
        step = self.micro_step
        group.gradients.accumulate(
            index,
            grad,
            step.scale * group.spec.share if scale is None else scale,
            stays=group.spec.reduce_at in step.adds_up,
            is_last=step.at_boundary,
        )
        self.views.attach_one(group, index)
        unit.use.has_new_gradients = True

    def set_gradient(self, unit: Unit, group: ShardedGroup, index: int, grad: Tensor) -> None:
        """Accumulate a gradient that the user set, as one of this rank: it is averaged over the ranks."""
        divisor = self.micro_step.divisor * group.spec.copies
        self.accumulate(unit, group, index, grad.clone(), self.loss_scale.value / divisor)
        self.sums_wait = True

    def sums_may_wait(self) -> bool:
        """Return whether a rank may have gradients that are not averaged yet; the answer is the same on all ranks."""
        return self.sums_wait

    def set_boundary(self, is_boundary: bool) -> None:
        """Set whether the step after the running micro-step applies the gradients."""
        if self.micro_step.is_boundary is not is_boundary:
            self.micro_step = replace(self.micro_step, is_boundary=is_boundary)

    @contextlib.contextmanager
    def without_division(self) -> Iterator[None]:
        """Do not divide gradients that arrive inside by the accumulation steps."""
        self.micro_step = replace(self.micro_step, divides=False)
        try:
            yield
        finally:
            self.micro_step = replace(self.micro_step, divides=True)

    @contextlib.contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Accumulate gradients that arrive inside on this rank; the next backward outside reduces them."""
        self.micro_step = replace(self.micro_step, syncs=False, is_deferred=True)
        try:
            yield
        finally:
            self.micro_step = replace(self.micro_step, syncs=True)

    def defer_reduction(self) -> None:
        """Note that gradients are deferred, by `no_sync` or before a boundary that the user decides on."""
        self.micro_step = replace(self.micro_step, is_deferred=True)

    # -------------------------------------------------------------------------------------------------- reduction

    def reduce(self, unit: Unit, *, all_groups: bool = False) -> None:
        """Start to average the gradients of a unit's groups that are to be reduced now, or of all its groups."""
        step = self.micro_step
        joined = Joined(f"REDUCE {unit.name or '(root)'}", _REDUCE) if unit.sets.joins_reductions else None
        for group in unit.trainable:
            reduce_at = group.spec.reduce_at
            if reduce_at not in step.reduces and not all_groups:
                continue
            if self.in_flight:
                self.finish(self._reduced_before(group))
            if self.trace is not None and (joined is None or joined.is_empty):
                self.trace.add(TraceAction.REDUCE_SCATTER, unit.index)
            by_steps = reduce_at is ReduceAt.MICRO_STEP and not step.paths_differ
            with torch.no_grad(), profiled("REDUCE", unit.name) if is_profiling() else NOT_PROFILED:
                group.gradients.reduce_scatter(
                    step.scale * group.spec.share,
                    stays=reduce_at in step.adds_up,
                    accumulates=step.accumulation_steps > 1 and by_steps,
                    loss_scale=self.loss_scale.value,
                    joined=joined,
                )
            self.in_flight[group] = step.at_boundary
        if joined is not None:
            with torch.no_grad(), profiled("REDUCE", unit.name) if is_profiling() else NOT_PROFILED:
                joined.start()

    def _reduced_before(self, group: ShardedGroup) -> list[ShardedGroup]:
        """Return the groups whose reduction must finish before the reduction of `group` starts.

        One unit is in flight while the next unit's gradients accumulate; the unit before is finished, and its buffers
        are reused. A unit with a second hop that the host has to start goes on during the unit after that.
        """
        before: list[ShardedGroup] = []
        units: dict[str, list[ShardedGroup]] = {}
        for other in self.in_flight:
            if other.unit != group.unit:
                units.setdefault(other.unit, []).append(other)
        with torch.no_grad():
            for groups in units.values():
                goes_on = False
                for other in groups if self._starts_hops else ():
                    goes_on = other.gradients.start_next_hop() or goes_on  # of all groups, not only up to the first
                if not goes_on:
                    before += groups
        return before

    def finish(self, groups: Sequence[ShardedGroup] | None = None) -> None:
        """Wait for the reduction of these groups, or of all in flight, and call `reduced` for their units."""
        reduced: dict[str, bool] = {}
        published: dict[str, Joined] = {}  # by unit with several groups: what follows at stage 0
        with torch.no_grad():
            for group in list(self.in_flight) if groups is None else groups:
                name = group.unit
                if self.units[name].sets.joins_reductions and name not in published:
                    published[name] = Joined(f"PUBLISH {name or '(root)'}", TrafficKind.PUBLISH)
                group.gradients.finish(published.get(name))
                reduced[name] = self.in_flight.pop(group)
            for joined in published.values():
                joined.start()
        if self.reduced is not None:
            for name, at_boundary in reduced.items():
                self.reduced(self.units[name], at_boundary)

    def finish_earlier(self) -> None:
        """Wait for reductions that micro-steps before the boundary left in flight."""
        self.finish([group for group, at_boundary in self.in_flight.items() if not at_boundary])

    def wait_for_larger_units(self, numel: int) -> None:
        """Wait for units larger than the one that runs next (a head before the blocks), which would make the peak."""
        large = set()
        for group in self.in_flight:
            if group.layout.padded > numel > 0:
                large.add(group.unit)
        if large:
            self.finish([group for group in self.in_flight if group.unit in large])

    def reduce_now(self, unit: Unit) -> None:
        """Average a unit's gradients so far, for a caller that will change them. More may come: no update starts."""
        self.reduce(unit, all_groups=True)
        for group in unit.trainable:
            self.in_flight[group] = False
        self.finish(unit.trainable)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Finish the boundary: deferred gradients are reduced inside."""
        before = self.micro_step
        if before.paths_differ or not before.at_boundary:
            self.micro_step = replace(before, is_boundary=True, syncs=True, is_ending=True)
        try:
            yield
        finally:
            self.micro_step = before
            self.end_boundary()

    @contextlib.contextmanager
    def without_post_reduce(self) -> Iterator[None]:
        """Call `reduced` for nothing that is reduced inside, because it is dropped."""
        told, self.reduced = self.reduced, None
        try:
            yield
        finally:
            self.reduced = told

    def end_boundary(self) -> None:
        """Note that all gradients of the boundary are averaged, or dropped."""
        self.sums_wait = False
        if self.micro_step.is_deferred:
            self.micro_step = replace(self.micro_step, is_deferred=False)

    # ----------------------------------------------------------------------------------------------------- the end

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Run a step of the user's own optimizer inside."""
        self.is_spending = True
        try:
            yield
        finally:
            self.is_spending = False

    def clear(self) -> None:
        """Tell the gradient views that the engine holds no gradients any more."""
        if self.is_spending:
            self.views.spend()
        else:
            self.views.clear()

    def forget(self) -> None:
        """Drop all gradients; no reduction may be in flight."""
        for unit in self.units.values():
            for group in unit.trainable:
                group.gradients.clear()
        self.clear()
