"""The scheduler of an engine: when units are unsharded, prefetched and resharded, and when gradients are reduced.

Two facts shape this file. First, hooks are unreliable: recomputation may stop before a forward ends, a queued backward
callback fires once per reentrant checkpoint, and a module called twice fires twice. So every action is idempotent,
nothing is released while its own backward may still need it, and `finish_backward` at the boundary decides. Second, all
ranks must issue the same collectives in the same order. So every decision about collectives depends only on what all
ranks see alike. What a rank reads and copies ahead for itself may depend on more.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwell.errors import BackwardError, ReleasedParameterError
from shardwell.runtime.hooks import ForwardCall, SavedViews, current_task
from shardwell.runtime.prefetch import ExecutionOrder, Prefetch, PrefetchLimits
from shardwell.runtime.reducer import MicroStep, Reducer
from shardwell.runtime.trace import NOT_PROFILED, Trace, TraceAction, is_profiling, profiled
from shardwell.runtime.transforms import in_transform, outside_trace, outside_transforms, refusal_of
from shardwell.sharding import Residency, ShardedGroup, Unit
from shardwell.sharding.edits import take_edits_closely
from shardwell.sharding.gradients import GradState
from shardwell.sharding.pending_update import PendingUpdate
from shardwell.sharding.unit import UnitOwner

_is_retained: Callable[[Unit], bool] = attrgetter("use.is_retained")


@dataclass
class GraphUse:
    """A record of whether the user may still run a backward through a graph that a forward recorded."""

    is_open: bool = False  # no step has used the graph up yet
    was_used: bool = False  # a backward went through it
    loss: weakref.ref[Tensor] | None = None  # of the last backward that freed its graph
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext  # each forward of the engine


class PassObserver(Protocol):
    """An object that learns how the passes of a training loop begin."""

    def forward_begins(self, inputs: Any) -> None:
        """Note a forward of the engine with gradients."""

    def part_begins(self) -> None:
        """Note a forward with gradients of a part of the model, outside of the engine's forward."""

    def backward_begins(self) -> None:
        """Note a backward, before anything is updated."""

    def step_begins(self) -> None:
        """Note a step, before its backward is finished."""


class Scheduler:
    """A scheduler that unshards, prefetches and reshards the units of one engine and starts their reduce-scatters."""

    def __init__(self, units: Sequence[Unit], limits: PrefetchLimits, micro_step: MicroStep) -> None:
        self.prefetch = Prefetch(limits, micro_step.num_averaged)
        self.trace: Trace | None = None
        self.reducer = Reducer(micro_step)
        self.reducer.drop_gradients = self.discard_backward
        self.observer: PassObserver | None = None
        self._in_model = False  # the engine's forward runs
        self.adopt: Callable[[Any], None] | None = None  # takes over an optimizer that the user made
        self.end: Callable[[], None] | None = None  # ends the engine, for another one that gets its model
        self._tasks: set[int] = set()
        self.graph = GraphUse()
        self.saved = SavedViews(self.request_unshard)
        self.calls: list[ForwardCall] = []  # the innermost last
        self._aliased: list[Unit] = []  # released, but other tensors still look at their memory
        self._bundle: Unit | None = None  # one whose pass goes on if another of its modules is used next
        self.adopt_units(units)

    def adopt_units(self, units: Sequence[Unit]) -> None:
        """Schedule these units from now on."""
        self.units = units
        self._resharding_units = [unit for unit in units if unit.resharding_groups]
        self.prefetch.adopt_units(units, self._resharding_units)
        self.saved.take(self._resharding_units)
        optimizer = next((unit.optimizer for unit in units if unit.optimizer is not None), None)
        take_edits = partial(take_edits_closely, units)
        reducer, views = self.reducer, self.reducer.views.take_edits
        owner = UnitOwner(self.retain, reducer.reduce_now, views, take_edits, self.adopt, optimizer, self.end)
        for unit in units:
            unit.owner = owner
        self.reducer.adopt_units({unit.name: unit for unit in units})

    def record(self, action: TraceAction, unit: Unit) -> None:
        """Append an action to the trace, if one is recorded."""
        if self.trace is not None:
            self.trace.add(action, unit.index)

    @contextlib.contextmanager
    def recording(self, trace: Trace | None = None) -> Iterator[Trace]:
        """Record all actions in a trace, by default in a new one."""
        trace = Trace([unit.name for unit in self.units]) if trace is None else trace
        before, self.trace, self.reducer.trace = self.trace, trace, trace
        try:
            yield trace
        finally:
            self.trace = self.reducer.trace = before

    # -------------------------------------------------------------------------------------------------- forward

    @contextlib.contextmanager
    def forward_scope(self, inputs: Any = ()) -> Iterator[None]:
        """Run the engine's forward inside. What an aborted pass left behind is dropped first."""
        if torch.is_grad_enabled():
            self.graph.is_open = True
        if current_task() == -1:  # otherwise the whole model is recomputed, and its units are in their backward
            if self.observer is not None and torch.is_grad_enabled():
                self.observer.forward_begins(inputs)
            self.graph.was_used = self.reducer.has_met_scale = False
            self._drop_leftovers()
            self.reducer.views.take_edits()
        before, self._in_model = self._in_model, True
        try:
            with self.graph.around():
                yield
        except (KeyboardInterrupt, SystemExit):  # torch calls no hooks of the modules inside
            self.saved.clear()
            raise
        except RuntimeError as error:
            if (refusal := refusal_of(error)) is None:
                raise
            raise refusal from error
        finally:
            self._in_model = before
        if not self.graph.is_open:
            self._end_without_graph()

    def _drop_leftovers(self) -> None:
        """Reset the state of units, hooks and prefetches that an aborted pass left behind."""
        if self._resharding_units:
            self.prefetch.forward.start()
            for link in self.prefetch.links:
                link.cancel()
            if self.saved.pushed:
                self.saved.clear()
        self.calls.clear()
        bundle, self._bundle = self._bundle, None
        for unit in self.units:
            if unit.use.is_retained:
                unit.check_retention()
            if unit.use.in_forward or unit.use.in_parts or unit.use.in_backward or unit is bundle:
                unit.use.in_forward, unit.use.in_parts, unit.use.in_backward = 0, 0, False
                self.reshard(unit)

    def _end_without_graph(self) -> None:
        """End a forward of the engine that recorded no graph: nothing will use what is retained or prefetched."""
        self._end_bundle()
        self.end_retention()
        for link in self.prefetch.links:
            link.cancel()
        for unit in self.units:
            if unit.residency is Residency.UNSHARDING:
                self.reshard(unit)

    def pre_forward(self, unit: Unit) -> None:
        """Unshard a unit before its forward, or before its recomputation in backward."""
        if current_task() != -1:
            self._pre_recomputation(unit)
            return
        if self._bundle is not None:
            self._end_bundle(unit)
        unit.use.in_forward += 1
        if torch.is_grad_enabled():
            self.graph.is_open = True
            if self.observer is not None and not self._in_model:
                self.observer.part_begins()
        if unit.resharding_groups or unit.residency is not Residency.UNSHARDED or unit.updates.is_awaited:
            if torch._C._get_tracing_state() is None:
                self._unshard(unit, self.prefetch.forward)
            else:
                with outside_trace(unit):
                    self._unshard(unit, self.prefetch.forward)
        if self.trace is not None:
            self.record(TraceAction.FORWARD, unit)

    def _pre_recomputation(self, unit: Unit) -> None:
        """Unshard a unit whose forward is recomputed: this is part of its backward."""
        if not unit.spec.is_tile:
            self.pre_backward(unit, recomputes=True)
            return
        self._enter_graph_task(unit)
        unit.use.in_backward = True
        self._start_unshard(unit)
        unit.wait()

    def post_forward(self, unit: Unit, *, ends: bool = True) -> None:
        """Reshard a unit after its forward, unless its backward needs it soon.

        Without `ends`, more modules of the unit are expected, and it stays unsharded until another unit is used.
        """
        if current_task() != -1:
            if unit.spec.is_tile:
                unit.use.in_backward = False
                self.reshard(unit)
            return
        unit.use.in_forward = max(unit.use.in_forward - 1, 0)
        if not ends:
            self._bundle = unit
        elif unit.resharding_groups and not (self.prefetch.limits.reuse_distance > 0 and self._used_again_soon(unit)):
            self.reshard(unit)

    def _end_bundle(self, used: Unit | None = None) -> None:
        """End the pass of a bundle of which more modules were expected, because another unit is used, or none."""
        bundle, self._bundle = self._bundle, None
        if bundle is None or bundle is used:
            return
        if bundle.use.in_backward or bundle.use.has_new_gradients:
            self.post_backward(bundle)
        elif bundle.resharding_groups:
            self.reshard(bundle)

    def abandon_forward(self, unit: Unit) -> None:
        """Reshard a unit whose forward ended in an error, which the user may catch."""
        unit.use.in_forward = max(unit.use.in_forward - 1, 0)
        self.reshard(unit)

    def _used_again_soon(self, unit: Unit) -> bool:
        """Return whether fewer than `reuse_distance` elements are used between a unit's forward and its backward."""
        after = self.prefetch.forward.elements_after(unit) if torch.is_grad_enabled() else None
        return after is not None and 2 * after < self.prefetch.limits.reuse_distance

    def _unshard(self, unit: Unit, order: ExecutionOrder) -> None:
        """Unshard a unit, wait for it, and start the prefetch of the units that are expected next."""
        if self._aliased:
            self._free_unaliased()
        if not unit.resharding_groups:
            unit.wait()
            return
        expected = order.visit(unit)
        self._start_unshard(unit)
        unit.wait()
        for ahead in self.prefetch.units_to_start(expected, order):
            self._start_unshard(ahead)
        for link in self.prefetch.links:
            link.start(expected, order)

    def _start_unshard(self, unit: Unit) -> None:
        """Start the all-gather of a unit, if it is sharded."""
        if unit.residency is not Residency.SHARDED:
            return
        if self.trace is not None:
            self.record(TraceAction.ALL_GATHER, unit)
        outside = contextlib.nullcontext() if in_transform() is None else outside_transforms()
        with outside, profiled("GATHER", unit.name) if is_profiling() else NOT_PROFILED:
            self.prefetch.gathers.unshard(unit)
        self.saved.find(unit)

    def reshard(self, unit: Unit) -> None:
        """Free a unit's unsharded parameters, unless they are still held."""
        if unit.reshard():
            if self.trace is not None:
                self.record(TraceAction.RESHARD, unit)
            if unit.is_aliased:
                self._aliased.append(unit)

    def _free_unaliased(self) -> None:
        """Free released units whose last view is gone, such as a view that a module returned and the hook cloned."""
        for unit in self._aliased:
            unit.free_if_unaliased()
        self._aliased = [unit for unit in self._aliased if unit.is_aliased]

    def keep_frozen(self, most: int) -> None:
        """Let frozen parameters stay unsharded from now on, unit after unit, up to `most` elements."""
        for unit in self.units:
            frozen = sum(group.layout.padded for group in unit.resharding_groups if not group.trainable)
            if 0 < frozen <= most:
                unit.keeps_frozen = True
                most -= frozen

    # ------------------------------------------------------------------------------------------------ retention

    def retain(self, unit: Unit) -> bool:
        """Unshard a released unit that is needed outside its own module, and keep it so until the step.

        Its views may be saved for backward by operations that no hook sees. It returns false and does nothing unless
        all ranks do the same thing anyway: in a forward or backward, or while a loss is computed from their outputs.
        """
        in_pass = current_task() != -1 or self._in_model or any(u.use.in_forward or u.use.in_parts for u in self.units)
        if not in_pass and not (self.graph.is_open and torch.is_grad_enabled()):
            return False
        unit.retain()
        self._start_unshard(unit)
        unit.wait()
        return True

    def retain_for_part(self, unit: Unit) -> None:
        """Retain a sharded unit, because a part of its module is called, but not by the module itself."""
        if torch.is_grad_enabled():
            self.graph.is_open = True
        unit.retain()
        self._start_unshard(unit)
        unit.wait()

    def end_forward(self) -> None:
        """End retention after a forward, if no graph was recorded."""
        if not self.graph.is_open:
            self.end_retention()

    def end_retention(self) -> None:
        """Reshard all retained units: no graph needs them any more."""
        self.graph.is_open = self.graph.was_used = False
        if retained := list(filter(_is_retained, self.units)):
            take_edits_closely(retained)  # of values whose memory is freed, the owner cannot be found
        for unit in retained:
            unit.use.is_retained = False
            self.reshard(unit)

    # ------------------------------------------------------------------------------------------------- backward

    def pre_backward(self, unit: Unit, *_grads: Any, recomputes: bool = False) -> None:
        """Unshard a unit before the first operation of its backward; it may be called repeatedly, and as a hook.

        Where gradients are enabled, a second backward will go through this one, and no hook will tell what it needs of
        the unit. `recomputes`: they are enabled only because the unit's forward is recomputed.
        """
        if self._bundle is not None:
            self._end_bundle(unit)
        self._enter_graph_task(unit)
        if not recomputes and torch.is_grad_enabled():
            unit.use.is_retained = True
        if not unit.use.in_backward:
            unit.use.in_backward = True
            if self.trace is not None:
                self.record(TraceAction.BACKWARD, unit)
            if self.reducer.in_flight:
                self.reducer.wait_for_larger_units(unit.numel)
        if unit.updates.pending is not None:
            unit.revoke_speculation()  # a graph that is used again saved the values before the update
        if unit.resharding_groups:
            self._unshard(unit, self.prefetch.backward)

    def announce_backward(self, *_grads: Any) -> None:
        """Prepare gradients for the model's backward, before its first operation; it may be called repeatedly."""
        if not self._tasks:
            self.reducer.views.detach()

    def request_unshard(self, unit: Unit) -> None:
        """Unshard a unit of which autograd reads saved tensors, whether or not a hook announced its backward."""
        where = f"unit '{unit.name or '(root)'}'"
        if self.reducer.units.get(unit.name) is not unit:
            raise BackwardError(
                f"{where} was built anew after the forward of this backward, because the model was changed in between: "
                "run the forward again"
            )
        if current_task() != -1:
            self.pre_backward(unit)
        elif not self.retain(unit):
            raise ReleasedParameterError(
                f"a graph saved parameters of {where}, but they are released: read what a graph has saved inside "
                "`with shardwell.zero.GatheredParameters(parameters):`"
            )

    def _enter_graph_task(self, unit: Unit) -> None:
        """Record the graph task in which a unit was seen, and end the unit's backward when that task ends."""
        task = unit.use.task = current_task()
        if task not in self._tasks:
            if not self._tasks:
                self._begin_backward()
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._post_graph_task, task))

    def _begin_backward(self) -> None:
        """Prepare for a backward when its first operation is seen."""
        if self.reducer.in_flight:
            self.reducer.finish_earlier()  # here, because all ranks are at the same place
        self.graph.was_used = True
        for unit in self.units:
            if unit.use.is_retained:
                unit.check_retention()
        if self._resharding_units:
            self.prefetch.backward.start()
        self.reducer.views.detach(has_begun=True)
        if self.observer is not None:
            self.observer.backward_begins()

    def accumulate_gradient(self, unit: Unit, group: ShardedGroup, index: int, parameter: Tensor) -> None:
        """Accumulate a parameter's gradient, which is complete for this graph task."""
        grad = parameter.grad
        if grad is not None:
            grad = self.reducer.views.take_incoming(group, index, grad)
        if grad is None:
            return
        if self.reducer.is_scaled and not self.reducer.has_met_scale:
            raise BackwardError(
                "these gradients did not come through the model's outputs as the engine returned them, so they lack "
                "the fp16 loss scale: an output was changed in place, or returned in a container that shardwell does "
                "not look into. Use engine.backward(loss)."
            )
        self._enter_graph_task(unit)
        self.reducer.accumulate(unit, group, index, grad)

    def post_backward(self, unit: Unit, *_grads: Any) -> None:
        """Reduce the gradients of a unit whose backward has ended, as far as is known, and reshard the unit.

        It may be called repeatedly, and as a hook. If one group of a unit is reduced, all are: which groups got a
        gradient may differ between ranks. In a unit that the user named as a leaf module, whether any group did may
        differ too. Gradients of earlier micro-steps wait for the next gradient: a unit that is called several times in
        a forward ends as often, and most of its gradients come with the last call.
        """
        if unit.use.has_new_gradients or (unit.spec.is_user_unit and unit.use.in_backward):
            self.reducer.reduce(unit)
        unit.use.has_new_gradients = unit.use.in_backward = False
        if unit.resharding_groups:
            self.reshard(unit)

    def _post_graph_task(self, task: int) -> None:
        """End the backward of all units that were seen in a graph task, also of units whose inputs need no gradient.

        In a task of a reentrant checkpoint the root and a bundle are not over: more of their gradients come in other
        tasks, and the task around them ends them, or the next unit ends the bundle.
        """
        self._tasks.discard(task)
        outer = max(self._tasks, default=-1)
        for unit in reversed(self.units):
            if unit.use.task != task:
                continue
            if outer != -1 and (unit.spec.followers or not unit.name):
                unit.use.task = outer
                self._bundle = unit if unit.spec.followers and unit.use.in_backward else self._bundle
                continue
            unit.use.task = -1
            if unit.use.in_backward or unit.use.has_new_gradients:
                self.post_backward(unit)
        step = self.reducer.micro_step
        if step.paths_differ or not step.at_boundary:
            self.reducer.sums_wait = True
        if not self._tasks:
            self.reducer.views.attach()

    # ----------------------------------------------------------------------------------------------------- step

    def finish_backward(self) -> None:
        """Finish at the boundary everything that backward started, and reduce the gradients that were deferred."""
        with self.reducer.ending():
            for unit in self.units:
                for group in unit.trainable:
                    if self.reducer.micro_step.paths_differ or group.gradients.state is GradState.PARTIAL:
                        unit.use.has_new_gradients = True
            self.end_passes()

    def end_passes(self) -> None:
        """End all passes and wait for all reductions in flight. Gradients that wait for the boundary still do."""
        self._bundle = None
        for unit in reversed(self.units):
            unit.use.task = -1
            self.post_backward(unit)
        self._tasks.clear()
        if self._resharding_units:
            for link in self.prefetch.links:
                link.cancel()
        self.reducer.finish()

    def discard_backward(self) -> None:
        """Finish as `finish_backward` does, but drop the gradients: no update starts. A graph may still be used."""
        with self.reducer.without_post_reduce():
            # Gradients that are dropped need not be shown to the other ranks first.
            if self.reducer.micro_step.paths_differ:
                self.end_passes()
                self.reducer.end_boundary()
            else:
                self.finish_backward()
        if self.graph.was_used:
            self.end_retention()

    def abandon_passes(self) -> None:
        """Forget all passes and gradients after a failure, without a collective: ranks may be at different places."""
        self._tasks.clear()
        self.reducer.in_flight.clear()
        for unit in self.units:
            unit.abandon_passes()
        self._drop_leftovers()
        self.graph = GraphUse()

    def after_update(self, unit: Unit, arrival: PendingUpdate | None = None) -> None:
        """Record a unit's update and publish it."""
        if self.trace is not None:
            self.record(TraceAction.STEP, unit)
        unit.updates.count += 1
        if unit.sets.with_values:  # a graph that saved them must not be used; `SavedView` checks released parameters
            torch.autograd.graph.increment_version(unit.sets.with_values)
        is_published = (arrival is not None or unit.sets.published) and self.prefetch.gathers.publish(unit, arrival)
        if is_published and self.trace is not None:
            self.record(TraceAction.PUBLISH, unit)
