"""The scheduler of an engine: when units are unsharded, prefetched and resharded, and when gradients are reduced.

Two facts shape this file. First, hooks are unreliable: recomputation may stop before a forward ends, a queued backward
callback fires once per reentrant checkpoint, and a module called twice fires twice. So every action is idempotent,
nothing is released while its own backward may still need it, and `finish_backward` at the boundary decides. Second, all
ranks must issue the same collectives in the same order. So every decision about collectives depends only on what all
ranks see alike. What a rank reads and copies ahead for itself may depend on more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.errors import BackwardError, ReleasedParameterError
from shardwell.offload.param_swap import ReadBuffers
from shardwell.optim.auto_commit import StepBeginning
from shardwell.runtime.execution_order import ExecutionOrder
from shardwell.runtime.pytree import tensors_in
from shardwell.runtime.reducer import Reducer
from shardwell.runtime.saved_tensors import SavedViews
from shardwell.runtime.trace import Trace, TraceAction, TraceEvent, profiled
from shardwell.runtime.transforms import named_refusals, outside_trace, outside_transforms
from shardwell.sharding import Residency, ShardedGroup, Unit
from shardwell.sharding.edits import look_closely
from shardwell.sharding.unit import PendingUpdate, UnitOwner


@dataclass(frozen=True)
class PrefetchLimits:
    """Limits of what may be unsharded at the same time; sizes are in elements."""

    prefetches: bool
    live: int
    reuse_distance: int


@dataclass
class ForwardCall:
    """A running forward of a unit."""

    unit: Unit
    is_counted: bool  # counted in the unit's `in_forward`
    is_hooked: bool = False  # it switched on the saved-tensor hooks


def current_task() -> int:
    """Return the id of the running autograd graph task; -1 outside backward."""
    return torch._C._current_graph_task_id()


class Scheduler:
    """A scheduler that unshards, prefetches and reshards the units of one engine and starts their reduce-scatters."""

    def __init__(
        self,
        units: Sequence[Unit],
        limits: PrefetchLimits,
        num_ranks: int,
        accumulation_steps: int,
        pages: ReadBuffers | None = None,
    ) -> None:
        self.limits = limits
        self.pages = pages  # for parameters on NVMe
        self.num_ranks = num_ranks
        self.trace: Trace | None = None
        self.reducer = Reducer(num_ranks, accumulation_steps, self.record)
        self.reducer.drop_gradients = self.discard_backward
        self.backward_begins: Callable[[StepBeginning], None] | None = None  # called before anything is updated
        self._num_forwards = 0  # of the engine, with gradients, since the last backward began
        self._is_partial = False  # since then, parts of the model were called outside of the engine's forwards
        self._is_chained = False  # since then, inputs of the model had a graph of their own
        self._in_model = False  # the engine's forward runs
        self.adopt: Callable[[Any], None] | None = None  # takes over an optimizer that the user made
        self._tasks: set[int] = set()
        self._graph_is_open = False  # a forward recorded a graph that no step has used up yet
        self._graph_was_used = False  # a backward went through it
        self.saved = SavedViews(self.request_unshard)
        self.calls: list[ForwardCall] = []  # the innermost last
        self._seen: list[Unit] = []  # released, but other tensors still look at their memory
        self.adopt_units(units)

    def adopt_units(self, units: Sequence[Unit]) -> None:
        """Schedule these units from now on."""
        self.units = units
        self._by_name = {unit.name: unit for unit in units}
        released = [unit for unit in units if unit.releasable]
        self._forward = ExecutionOrder(released)
        root = [unit for unit in released if not unit.name]  # its outputs are the model's: it comes first both ways
        self._backward = ExecutionOrder(root + [unit for unit in released[::-1] if unit.name])
        self._lifts = any(unit.can_prefetch_to_device for unit in units)
        self.saved.take(released)
        optimizer = next((unit.optimizer for unit in units if unit.optimizer is not None), None)
        take_edits = partial(look_closely, units)
        owner = UnitOwner(
            self.retain, self.reducer.reduce_now, self.reducer.take_edits, take_edits, self.adopt, optimizer
        )
        for unit in units:
            unit.owner = owner
        self.reducer.adopt_units(self._by_name)

    def record(self, action: TraceAction, unit: Unit) -> None:
        """Append an action to the trace, if one is recorded."""
        if self.trace is not None:
            self.trace.events.append(TraceEvent(action, unit.index))

    @contextlib.contextmanager
    def recording(self) -> Iterator[Trace]:
        """Record all actions in a new trace."""
        trace = Trace([unit.name for unit in self.units])
        before, self.trace = self.trace, trace
        try:
            yield trace
        finally:
            self.trace = before

    # -------------------------------------------------------------------------------------------------- forward

    @contextlib.contextmanager
    def forward_scope(self, inputs: Any = ()) -> Iterator[None]:
        """Run the engine's forward inside. What an aborted pass left behind is dropped first."""
        self._graph_is_open = self._graph_is_open or torch.is_grad_enabled()
        if current_task() == -1:  # otherwise the whole model is recomputed, and its units are in their backward
            if self.backward_begins is not None and torch.is_grad_enabled():
                self._num_forwards += 1
                self._is_chained = self._is_chained or any(tensor.requires_grad for tensor in tensors_in(inputs))
            self._graph_was_used = self.reducer.has_met_scale = False
            self._check_retention()
            self._drop_leftovers()
            self.reducer.take_edits()
        before, self._in_model = self._in_model, True
        try:
            with named_refusals():
                yield
        finally:
            self._in_model = before
            if self.pages is not None:
                self.pages.pace.pause()

    def _drop_leftovers(self) -> None:
        """Reset the state of units, hooks and prefetches that an aborted pass left behind."""
        self._forward.start()
        self._cancel_prefetch()
        self.saved.clear()
        self.calls.clear()
        for unit in self.units:
            if unit.in_forward or unit.inside or unit.in_backward:
                unit.in_forward, unit.inside, unit.in_backward = 0, 0, False
                self.reshard(unit)

    def _cancel_prefetch(self) -> None:
        """Cancel prefetches that were not used, because a pass begins or ends."""
        if self.pages is not None:
            self.pages.pace.pause()
        for unit in self.units if self.pages is not None or self._lifts else ():
            unit.cancel_prefetch()

    def pre_forward(self, unit: Unit) -> None:
        """Unshard a unit before its forward, or before its recomputation in backward."""
        if current_task() != -1:  # recomputation: this is part of the unit's backward
            if unit.is_brief:
                self._enter_graph_task(unit)
                unit.in_backward = True
                self._start_unshard(unit)
                unit.wait()
            else:
                self.pre_backward(unit)
            return
        unit.in_forward += 1
        self._graph_is_open = self._graph_is_open or torch.is_grad_enabled()
        self._is_partial = self._is_partial or (not self._in_model and torch.is_grad_enabled())
        if torch._C._get_tracing_state() is not None:
            with outside_trace(unit):
                self._unshard(unit, self._forward)
        else:
            self._unshard(unit, self._forward)
        self.record(TraceAction.FORWARD, unit)

    def post_forward(self, unit: Unit) -> None:
        """Reshard a unit after its forward, unless its backward needs it soon."""
        if current_task() != -1:
            if unit.is_brief:
                unit.in_backward = False
                self.reshard(unit)
            return
        unit.in_forward = max(unit.in_forward - 1, 0)
        if not self._used_again_soon(unit):
            self.reshard(unit)

    def abandon_forward(self, unit: Unit) -> None:
        """Reshard a unit whose forward ended in an error, which the user may catch."""
        unit.in_forward = max(unit.in_forward - 1, 0)
        self.reshard(unit)

    def _used_again_soon(self, unit: Unit) -> bool:
        """Return whether fewer than `reuse_distance` elements are used between a unit's forward and its backward."""
        if self.limits.reuse_distance <= 0 or not torch.is_grad_enabled():
            return False
        after = self._forward.elements_after(unit)
        return after is not None and 2 * after < self.limits.reuse_distance

    def _unshard(self, unit: Unit, order: ExecutionOrder) -> None:
        """Unshard a unit, wait for it, and start the prefetch of the units that are expected next."""
        if self._seen:
            self._look_at_seen()
        if self.pages is not None and unit.releasable and order.last is not unit:
            self.pages.pace.enter()
        expected = order.visit(unit) if unit.releasable else None
        self._start_unshard(unit)
        unit.wait()
        if expected is not None:
            if self._worth_prefetching(expected, order):
                self._start_unshard(expected)
            self._prefetch_further(unit, order)

    def _prefetch_further(self, unit: Unit, order: ExecutionOrder) -> None:
        """Beyond the next unit's all-gather, copy the unit after it to the device, and read later units from NVMe."""
        depth = self.pages.pace.depth if self.pages is not None else 0
        ahead = order.following(unit, 1 + self._lifts + depth)
        for other in self.units if self._lifts else ():
            if other.is_on_device and other not in ahead[:2]:
                other.cancel_prefetch()  # a wrong guess
        if (
            self._lifts
            and len(ahead) > 1
            and self._has_room(ahead[1], order, self.num_ranks)
            and ahead[1].prefetch_to_device()
        ):
            self.record(TraceAction.LIFT, ahead[1])
        for later in ahead:
            if later.prefetch_from_disk():
                self.record(TraceAction.READ, later)

    def _worth_prefetching(self, unit: Unit, order: ExecutionOrder) -> bool:
        """Return whether to start the all-gather of a unit ahead of its use."""
        may_wait = not unit.is_up_to_date if self.num_ranks == 1 else unit.awaits_update
        if unit.residency is not Residency.SHARDED or may_wait:
            return False  # waiting for an update here would delay work that can already run
        return self._has_room(unit, order)

    def _has_room(self, unit: Unit, order: ExecutionOrder, parts: int = 1) -> bool:
        """Return whether a unit, or one of `parts` equal parts of it, may be on the device ahead of its use."""
        if order is self._backward and isinstance(unit.module, nn.Embedding):
            return False  # nothing in its backward waits for its values: prefetch would only take memory
        return self.limits.prefetches and self._live() + unit.numel // parts <= self.limits.live

    def _live(self) -> int:
        """Return the number of elements of units that are unsharded or being unsharded."""
        return sum(unit.numel for unit in self.units if unit.residency is not Residency.SHARDED)

    def _start_unshard(self, unit: Unit) -> None:
        """Start the all-gather of a unit, if it is sharded."""
        if unit.residency is Residency.SHARDED:
            self.record(TraceAction.GATHER, unit)
            with outside_transforms(), profiled("GATHER", unit.name):
                unit.unshard()
            self.saved.find(unit)

    def reshard(self, unit: Unit) -> None:
        """Free a unit's unsharded parameters, unless they are still held."""
        if unit.reshard():
            self.record(TraceAction.RELEASE, unit)
            if unit.is_seen:
                self._seen.append(unit)

    def _look_at_seen(self) -> None:
        """Free released units whose last view is gone, such as a view that a module returned and the hook cloned."""
        seen, self._seen = self._seen, []
        for unit in seen:
            unit.free_unseen()
            if unit.is_seen:
                self._seen.append(unit)

    def keep_frozen(self, most: int) -> None:
        """Let frozen parameters stay unsharded from now on, unit after unit, up to `most` elements."""
        for unit in self.units:
            frozen = sum(group.layout.padded for group in unit.releasable if not group.trainable)
            if 0 < frozen <= most:
                unit.keeps_frozen = True
                most -= frozen

    # ------------------------------------------------------------------------------------------------ retention

    def retain(self, unit: Unit) -> bool:
        """Unshard a released unit that is needed outside its own module, and keep it so until the step.

        Its views may be saved for backward by operations that no hook sees. It returns false and does nothing unless
        all ranks do the same thing anyway: in a forward or backward, or while a loss is computed from the outputs of a
        forward.
        """
        in_pass = current_task() != -1 or self._in_model or any(u.in_forward or u.inside for u in self.units)
        if not in_pass and not (self._graph_is_open and torch.is_grad_enabled()):
            return False
        unit.retain()
        self._start_unshard(unit)
        unit.wait()
        return True

    def pre_inner_forward(self, unit: Unit) -> None:
        """Retain a unit if a part of its module is called, but not by the module itself."""
        unit.inside += 1
        if not unit.in_forward and unit.residency is not Residency.UNSHARDED:
            self._graph_is_open = self._graph_is_open or torch.is_grad_enabled()
            unit.retain()
            self._start_unshard(unit)
            unit.wait()

    def post_inner_forward(self, unit: Unit) -> None:
        """Note that a part of a unit's module has ended or failed; retention may end with the outermost part."""
        unit.inside = max(unit.inside - 1, 0)
        if unit.is_retained and not unit.inside and not unit.in_forward:
            self.end_forward()

    def end_forward(self) -> None:
        """End retention after a forward, if no graph was recorded."""
        if not self._graph_is_open:
            self.end_retention()

    def drop_unused(self) -> None:
        """After the engine's forward, drop prefetches and all-gathers that were not used, if no graph was recorded."""
        if not self._graph_is_open:
            self._cancel_prefetch()
        for unit in self.units if not self._graph_is_open else ():
            if unit.residency is Residency.UNSHARDING:
                self.reshard(unit)

    def _check_retention(self) -> None:
        """Warn of changes that the user made to retained units, before they are lost."""
        for unit in self.units:
            if unit.is_retained:
                unit.check_retention()

    def end_retention(self) -> None:
        """Reshard all retained units: no graph needs them any more."""
        self._graph_is_open = self._graph_was_used = False
        lent = [unit for unit in self.units if unit.is_retained]
        if lent:
            look_closely(lent)  # once their memory is freed, the owner of a parameter's values cannot be found
        for unit in lent:
            unit.is_retained = False
            self.reshard(unit)

    # ------------------------------------------------------------------------------------------------- backward

    def pre_backward(self, unit: Unit, *, keeps_graph: bool = False) -> None:
        """Unshard a unit before the first operation of its backward; it may be called repeatedly.

        `keeps_graph`: a second backward will go through this one, and no hook will tell what it needs of the unit.
        """
        self._enter_graph_task(unit)
        unit.is_retained = unit.is_retained or keeps_graph
        if not unit.in_backward:
            unit.in_backward = True
            self.record(TraceAction.BACKWARD, unit)
            self.reducer.finish_larger(unit.numel)
        unit.revoke_speculation()  # a graph that is used again saved the values before the update
        if unit.releasable:
            self._unshard(unit, self._backward)

    def announce_backward(self) -> None:
        """Prepare gradients for the model's backward, before its first operation; it may be called repeatedly."""
        if not self._tasks:
            self.reducer.begin_backward()

    def request_unshard(self, unit: Unit) -> None:
        """Unshard a unit of which autograd reads saved tensors, whether or not a hook announced its backward."""
        where = f"unit '{unit.name or '(root)'}'"
        if self._by_name.get(unit.name) is not unit:
            raise BackwardError(
                f"{where} was built anew after the forward of this backward, because the model was changed in between: "
                "run the forward again"
            )
        if current_task() != -1:
            self.pre_backward(unit, keeps_graph=torch.is_grad_enabled())
        elif not self.retain(unit):
            raise ReleasedParameterError(
                f"a graph saved parameters of {where}, but they are released: read what a graph has saved inside "
                "`with shardwell.zero.GatheredParameters(parameters):`"
            )

    def _enter_graph_task(self, unit: Unit) -> None:
        """Record the graph task in which a unit was seen, and end the unit's backward when that task ends."""
        task = unit.task = current_task()
        if task not in self._tasks:
            if not self._tasks:
                self.reducer.finish_earlier()  # here, because all ranks are at the same place
                self._graph_was_used = True
                self._check_retention()
                self._backward.start()
                self.reducer.begin_backward(has_begun=True)
                self._tell_of_backward()
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_task(task))

    def _tell_of_backward(self) -> None:
        if self.backward_begins is not None:
            keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
            self.backward_begins(StepBeginning(self._num_forwards, self._is_chained, self._is_partial, keeps_graph))
        self._num_forwards, self._is_chained, self._is_partial = 0, False, False

    def accumulate_gradient(self, unit: Unit, group: ShardedGroup, index: int, parameter: Tensor) -> None:
        """Accumulate a parameter's gradient, which is complete for this graph task."""
        grad = self.reducer.incoming(group, index, parameter)
        if grad is not None:
            self._enter_graph_task(unit)
            self.reducer.accumulate(unit, group, index, parameter, grad)

    def post_backward(self, unit: Unit) -> None:
        """Reduce the gradients of a unit whose backward has ended, as far as is known, and reshard the unit.

        If one group of a unit is reduced, all are: which groups got a gradient may differ between ranks. In a unit that
        the user named as a leaf module, whether any group did may differ too. Gradients of earlier micro-steps wait for
        the next gradient: a unit that is called several times in a forward ends as often, and most of its gradients
        come with the last call.
        """
        if unit.has_news or (unit.is_named and unit.in_backward):
            self.reducer.reduce(unit)
        unit.has_news = unit.in_backward = False
        self.reshard(unit)

    def _end_task(self, task: int) -> None:
        """End the backward of all units that were seen in a graph task, also of units whose inputs need no gradient."""
        for unit in reversed(self.units):
            if unit.task == task:
                unit.task = -1
                if unit.in_backward or unit.has_news:
                    self.post_backward(unit)
        self._tasks.discard(task)
        self.reducer.end_task()
        if not self._tasks:
            self.reducer.hang()

    # ----------------------------------------------------------------------------------------------------- step

    def finish_backward(self) -> None:
        """At the boundary, finish everything that backward started, and reduce the gradients that were deferred."""
        with self.reducer.ending():
            for unit in self.units:
                has_sums = any(group.gradients.is_partial for group in unit.trainable)
                unit.has_news = unit.has_news or has_sums or (self.reducer.paths_differ and bool(unit.trainable))
            self.end_passes()

    def end_passes(self) -> None:
        """End all passes and wait for all reductions in flight. Gradients that wait for the boundary still do."""
        for unit in reversed(self.units):
            unit.task = -1
            self.post_backward(unit)
        self._tasks.clear()
        self._cancel_prefetch()
        self.reducer.finish_all()

    def discard_backward(self) -> None:
        """Finish as `finish_backward` does, but drop the gradients: no update starts. A graph may still be used."""
        with self.reducer.telling_nobody():
            if self.reducer.paths_differ:  # gradients that are dropped need not be shown to the other ranks first
                self.end_passes()
                self.reducer.end_boundary()
            else:
                self.finish_backward()
        if self._graph_was_used:
            self.end_retention()

    def after_update(self, unit: Unit, arrival: PendingUpdate | None = None) -> None:
        """Record a unit's update and publish it."""
        self.record(TraceAction.STEP, unit)
        unit.note_update()
        if unit.publish(arrival):
            self.record(TraceAction.PUBLISH, unit)
