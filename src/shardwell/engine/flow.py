"""When things move: gathers before use, prefetch, releases after use, reduces as gradients complete.

Two facts shape this file. Hooks lie: recomputation may stop before a forward ends, a queued backward callback fires
once per reentrant checkpoint, and a module called twice fires twice; so every move is idempotent, nothing is released
while its own backward may still need it, and `finish` at the step is what counts. And all ranks must issue the same
collectives in the same order; so every decision here depends only on what all ranks see alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from shardwell.engine.order import Order
from shardwell.engine.trace import Action, Event, Trace
from shardwell.unit import Group, Residency, Unit
from shardwell.unit.table import ReduceAt


@dataclass(frozen=True)
class Limits:
    """How much may be whole at once, in elements."""

    prefetch: int
    live: int
    reuse_distance: int


def current_task() -> int:
    """The running autograd graph task; -1 outside backward."""
    return torch._C._current_graph_task_id()


class Flow:
    """Moves the units of one engine."""

    def __init__(self, units: Sequence[Unit], limits: Limits, num_ranks: int, accumulation_steps: int) -> None:
        self.units = units
        self.limits = limits
        self.num_ranks = num_ranks
        self.accumulation_steps = accumulation_steps
        self.is_boundary = True
        self.sync = True  # off inside no_sync
        self.divide_by_steps = True
        self.trace: Trace | None = None
        self.gradients_complete: Callable[[Unit], None] | None = None  # whom to tell that a unit's gradients are in
        self._by_name = {unit.name: unit for unit in units}
        released = [unit for unit in units if unit.releasable]
        self._forward = Order(released)
        root = [unit for unit in released if not unit.name]  # its outputs are the model's: it comes first both ways
        self._backward = Order(root + [unit for unit in released[::-1] if unit.name])
        self._tasks: set[int] = set()
        self._reducing: dict[Group, bool] = {}  # on their way, and whether they are the boundary's

    def note(self, action: Action, unit: Unit) -> None:
        if self.trace is not None:
            self.trace.events.append(Event(action, unit.index))

    # -------------------------------------------------------------------------------------------------- forward

    def start_forward(self) -> None:
        """The outermost forward begins: whatever an aborted pass left behind is dropped."""
        self._forward.start()
        for unit in self.units:
            if unit.in_forward or unit.in_backward:
                unit.in_forward, unit.in_backward = 0, False
                self.release(unit)

    def enter_forward(self, unit: Unit) -> None:
        if current_task() != -1:  # recomputation: this is part of the unit's backward
            self.enter_backward(unit)
            return
        unit.in_forward += 1
        self._make_whole(unit, self._forward)
        self.note(Action.FORWARD, unit)

    def leave_forward(self, unit: Unit) -> None:
        if current_task() != -1:
            return
        unit.in_forward = max(unit.in_forward - 1, 0)
        if not self._used_again_soon(unit):
            self.release(unit)

    def _used_again_soon(self, unit: Unit) -> bool:
        if self.limits.reuse_distance <= 0 or not torch.is_grad_enabled():
            return False
        after = self._forward.elements_after(unit)
        return after is not None and 2 * after < self.limits.reuse_distance

    def _make_whole(self, unit: Unit, order: Order) -> None:
        expected = order.visit(unit) if unit.releasable else None
        self._gather(unit)
        unit.wait()
        if expected is not None and self._worth_prefetching(expected, order):
            self._gather(expected)

    def _worth_prefetching(self, unit: Unit, order: Order) -> bool:
        if unit.residency is not Residency.RELEASED:
            return False
        if order is self._backward and isinstance(unit.module, nn.Embedding):
            return False  # nothing in its backward waits for its values: early is only more memory
        return unit.numel <= self.limits.prefetch and self._live() + unit.numel <= self.limits.live

    def _live(self) -> int:
        return sum(unit.numel for unit in self.units if unit.residency is not Residency.RELEASED)

    def _gather(self, unit: Unit) -> None:
        if unit.residency is Residency.RELEASED:
            self.note(Action.GATHER, unit)
            with record_function(f"shardwell::GATHER {unit.name}"):
                unit.gather()

    def release(self, unit: Unit) -> None:
        if unit.release():
            self.note(Action.RELEASE, unit)

    # ------------------------------------------------------------------------------------------------- backward

    def enter_backward(self, unit: Unit) -> None:
        """Called before the first op of a unit's backward; may be called again."""
        self._meet(unit)
        if not unit.in_backward:
            unit.in_backward = True
            self.note(Action.BACKWARD, unit)
        if unit.releasable:
            self._make_whole(unit, self._backward)

    def _meet(self, unit: Unit) -> None:
        """Remember in which graph task a unit was seen, and look after it when the task ends."""
        task = current_task()
        unit.task = task
        if task not in self._tasks:
            if not self._tasks:
                self._backward.start()
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_task(task))

    def take_gradient(self, unit: Unit, group: Group, index: int, parameter: Tensor) -> None:
        """A parameter's gradient is complete (for this graph task): move it into the group's flat buffer."""
        grad = parameter.grad
        if grad is None:
            return
        self._meet(unit)
        steps = self.accumulation_steps if self.divide_by_steps else 1
        scale = 1.0 / (self.num_ranks * steps)
        with torch.no_grad():
            group.gradients.absorb(index, grad.detach(), scale, stays=not self._reduces_now(group))
        parameter.grad = None
        unit.arrived.add(id(parameter))
        if len(unit.arrived) == unit.num_trainable and not unit.waits_for_inputs:
            self.end_backward(unit)

    def _reduces_now(self, group: Group) -> bool:
        return self.sync and (self.is_boundary or group.row.reduce_at is ReduceAt.MICRO_STEP)

    def end_backward(self, unit: Unit) -> None:
        """A unit's backward is over, as far as one can tell: reduce what arrived, release."""
        for group in unit.trainable:
            if group.gradients.is_partial and self._reduces_now(group):
                self._reduce(unit, group)
        unit.arrived.clear()
        unit.in_backward = unit.waits_for_inputs = False
        self.release(unit)

    def _reduce(self, unit: Unit, group: Group) -> None:
        # One reduce is in flight while the next unit's gradients fill: finish the one before, its buffer is next.
        self._finish_reduces([other for other in self._reducing if other.unit != group.unit])
        self.note(Action.REDUCE, unit)
        accumulates = self.accumulation_steps > 1 and group.row.reduce_at is ReduceAt.MICRO_STEP
        with torch.no_grad(), record_function(f"shardwell::REDUCE {unit.name}"):
            group.gradients.reduce(accumulates=accumulates)
        self._reducing[group] = self.is_boundary and self.sync

    def _finish_reduces(self, groups: list[Group]) -> None:
        complete: dict[str, None] = {}
        with torch.no_grad():
            for group in groups:
                group.gradients.finish()
                if self._reducing.pop(group):
                    complete[group.unit] = None
        if self.gradients_complete is not None:
            for name in complete:
                self.gradients_complete(self._by_name[name])

    def _end_task(self, task: int) -> None:
        """A graph task ended: units that were seen in it are done, also those with parameters that got no gradient."""
        for unit in reversed(self.units):
            if unit.task == task:
                unit.task = -1
                if unit.in_backward or unit.arrived:
                    self.end_backward(unit)
        self._tasks.discard(task)

    # ----------------------------------------------------------------------------------------------------- step

    def finish(self) -> None:
        """Everything that backward started is finished; whatever was kept back by `no_sync` is reduced."""
        sync, boundary = self.sync, self.is_boundary
        self.sync = self.is_boundary = True
        for unit in reversed(self.units):
            unit.task = -1
            self.end_backward(unit)
        self.sync, self.is_boundary = sync, boundary
        self._tasks.clear()
        self._finish_reduces(list(self._reducing))

    def after_update(self, unit: Unit) -> None:
        self.note(Action.STEP, unit)
        if unit.publish():
            self.note(Action.PUBLISH, unit)
