"""The executor for units that are stepped on the host: which are updated before the norm, and with which factor."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell.errors import ShardwellError
from shardwell.memory import Event
from shardwell.offload.cores import update_cores
from shardwell.offload.cpu_kernels import kernel_for
from shardwell.offload.early_update import EarlyExecutor, Norm, has_all_gradients
from shardwell.offload.host_updates import ClipFromNorm, HostUpdateQueue
from shardwell.offload.optimizer_swap import OptimizerSwapper
from shardwell.offload.speculation import hyperparameters_of
from shardwell.offload.storage import swapped_masters
from shardwell.offload.worker import Worker, turns_of
from shardwell.optim.executor import StepOptions
from shardwell.optim.grad_norm import norm_of, sum_of_squares
from shardwell.optim.loss_scale import LossScale
from shardwell.optim.param_slices import ParamSlice, ParamSlices
from shardwell.sharding import EngineContext, Unit
from shardwell.sharding.pending_update import PendingUpdate
from shardwell.sharding.spec import CommitPolicy


def make_executor(
    inner: Optimizer, slices: ParamSlices, context: EngineContext, options: StepOptions
) -> EarlyExecutor | HostExecutor:
    """Return the executor for units of which some are stepped on the host, or before the norm is known."""
    store: OptimizerSwapper | None = None
    if context.disk is not None:
        store = OptimizerSwapper(context.disk, inner, slices, context, options.buffer_count)
        for unit in slices.units:
            store.add(unit)
    queue = host_updates(
        inner, slices.units, context, options.buffer_count, store, eight_bits=options.eight_bit_moments
    )
    device = EarlyExecutor(inner, slices, context, options.scale, queue)
    return device if queue is None else HostExecutor(queue, device, context, options.scale, options.clip)


def host_updates(
    inner: Optimizer,
    units: list[Unit],
    context: EngineContext,
    num_slots: int,
    store: OptimizerSwapper | None,
    *,
    eight_bits: bool,
) -> HostUpdateQueue | None:
    """Return the queue of host updates, or None if no state below the device can be stepped by a kernel."""
    mine = [unit for unit in units if any(group.is_stepped_on_host for group in unit.trainable)]
    if not mine:
        if eight_bits and any(unit.trainable for unit in units):
            warnings.warn(
                'shardwell.moments "8bit" has no effect: no optimizer state is stored on the host or on disk. Is '
                "offload_optimizer.ratio 0, or is there room on the device?",
                stacklevel=2,
            )
        return None
    buses = context.device.local_gpu_buses()
    cores = None if buses is None else update_cores(*buses)  # None: as many threads as torch has, on any core
    threads = torch.get_num_threads() if cores is None else len(cores)
    kernel = kernel_for(inner, threads, eight_bits=eight_bits, beside_gpu=context.device.has_streams)
    groups = [group for unit in mine for group in unit.trainable if group.is_stepped_on_host]
    if kernel is None or any(group.precision.master is not torch.float32 for group in groups):
        if any(swapped_masters(group) is not None for group in groups):
            raise ShardwellError(
                f"optimizer state on disk is stepped by kernels, and there is none for {type(inner).__name__} with "
                f"these options over {groups[0].precision.master}: use AdamW, Adam, SGD, Adagrad or Lion over fp32 "
                'masters, or set offload_optimizer.device to "cpu"'
            )
        if eight_bits:
            raise ShardwellError(
                'shardwell.moments "8bit" needs a kernel, and there is none for '
                f"{type(inner).__name__} with these options over {groups[0].precision.master}: use AdamW or Adam "
                'without amsgrad and the like, over fp32 masters, or set it to "fp32"'
            )
        return None
    worker = Worker("shardwell host updates", cores, turns=turns_of(context.device))
    return HostUpdateQueue(context, inner, kernel, mine, worker, num_slots, store)


class HostExecutor:
    """Steps the groups whose optimizer state is stored on the host or on disk, and contains an executor for the others.

    A unit can have both: its small persistent groups stay on the device.
    """

    def __init__(
        self, queue: HostUpdateQueue, device: EarlyExecutor, context: EngineContext, scale: LossScale, clip: float
    ) -> None:
        self.queue, self.device = queue, device
        self.inner, self.slices, self.summed_with_norm = device.inner, device.slices, device.summed_with_norm
        self.auto = device.auto
        self._context, self._scale, self._clip = context, scale, clip
        self._norms: dict[int, list[tuple[Norm, bool]]] = {}  # by unit: norms of gradients that were copied to the host
        for unit in self.slices.units:
            self._exclude(unit)

    def _exclude(self, unit: Unit) -> None:
        """Keep the groups that are stepped here from the executor for the device."""
        self.device.elsewhere.update(group for group in unit.trainable if group.is_stepped_on_host)

    @property
    def vetoes_on_device(self) -> bool:
        is_all_here = all(group.is_stepped_on_host for unit in self.slices.units for group in unit.trainable)
        return self.device.vetoes_on_device or (self._context.device.has_streams and is_all_here)

    # ------------------------------------------------------------------------------------------------- backward

    def reduced(self, unit: Unit, at_boundary: bool) -> None:
        self.queue.offloader.accumulate(unit)
        if at_boundary:
            for group in unit.trainable:
                group.gradients.wait()  # full gradients may still be in their all-gather
            is_complete = has_all_gradients(unit)
            self._take_gradients(unit, is_complete=is_complete)
            self.device.begin_update(unit, is_complete=is_complete)

    def _take_gradients(self, unit: Unit, *, is_complete: bool) -> None:
        """Copy a unit's reduced gradients of this boundary to the host, and update the unit if it need not wait."""
        commit = next((group.spec.commit for group in unit.trainable if group.is_stepped_on_host), None)
        if commit is None:
            return
        self.queue.revoke(unit)  # a gradient came late: the update was computed without it
        updates_early = is_complete and self._updates_early(unit, commit)
        shards = [s for s in self.slices.of(unit) if s.group.is_stepped_on_host and s.gradient is not None]
        self._norms[unit.index] = [self._norm_of(shard) for shard in shards]
        self.queue.offloader.offload(unit, waits=not updates_early or commit is CommitPolicy.SPECULATIVE)
        if updates_early:
            self._start_early(unit, commit)

    def _updates_early(self, unit: Unit, commit: CommitPolicy) -> bool:
        if commit is CommitPolicy.SPECULATIVE:
            return self.queue.may_speculate(self.slices.of(unit))
        return commit is CommitPolicy.IMMEDIATE

    def _norm_of(self, shard: ParamSlice) -> tuple[Norm, bool]:
        """Return the norm of a slice's gradient.

        It is computed on the device if the gradient is there, which is cheap and gives the same bits as without
        offload. Sums over micro-steps are on the host only.
        """
        assert shard.gradient is not None
        if not self.queue.offloader.accumulates(shard.group):
            return norm_of(shard)
        return self.queue.offloader.norm_later(shard.group, shard.gradient), shard.group.spec.gradients.axis is None

    def _start_early(self, unit: Unit, commit: CommitPolicy) -> None:
        """Queue a unit's update before the norm is known."""
        if self.queue.is_queued(unit):
            raise ShardwellError(f"unit '{unit.name}' got another gradient after its update; commit after the norm")
        factor = ClipFromNorm(*self._own_norm(unit), self._scale.value)
        assumed = 1.0 / self._scale.value if commit is CommitPolicy.SPECULATIVE else None
        self.queue.start(unit, self.slices.of(unit), hyperparameters_of(self.inner), factor, assumed)

    def _own_norm(self, unit: Unit) -> tuple[Callable[[], float], Event]:
        """Return the norm of a unit's gradients on this rank, and the event after which it is known."""
        norms = [norm for norm, _ in self._norms[unit.index]]
        later = [norm for norm in norms if not isinstance(norm, Tensor)]
        here = sum_of_squares([norm for norm in norms if isinstance(norm, Tensor)], self._context.device).sqrt()
        read = self._context.device.read_async(here)
        return lambda: math.hypot(float(read.get()), *(norm() for norm in later)), read.event

    def gradients_read(self, unit: Unit) -> None:
        self.device.gradients_read(unit)

    def gradients_change(self, unit: Unit) -> None:
        self.device.gradients_change(unit)
        if self.queue.is_queued(unit):
            raise ShardwellError(
                f"the update of unit '{unit.name}' has begun with the gradients that backward gave. To change them "
                'before a step, set "shardwell": {"commit": "after_norm"}.'
            )
        self._norms.pop(unit.index, None)

    def gradients_dropped(self, what: str) -> None:
        self.device.gradients_dropped(what)

    def stop_watching(self) -> None:
        self.device.stop_watching()

    def is_updated_early(self, unit: Unit) -> bool:
        return self.device.is_updated_early(unit)

    # ----------------------------------------------------------------------------------------------------- step

    def norms(self) -> Iterator[tuple[Tensor, bool]]:
        self.device.report.note(self._norms_at_once)
        for unit in self.slices.units:
            on_host, early = self._norms.get(unit.index), self.device.early_norms.get(unit.index)
            for norm, is_replicated in on_host or ():
                known = norm if isinstance(norm, Tensor) else self._context.device.scalar(norm(), torch.float64)
                yield known, is_replicated
            yield from early or ()
            for shard in self.slices.of(unit):
                counted = on_host if shard.group.is_stepped_on_host else early
                if counted is None and shard.gradient is not None:
                    shard.group.gradients.reduced.ensure_readable()  # it may be a sum that the host is still computing
                    norm, is_replicated = norm_of(shard)
                    yield norm.to(self._context.device.torch_device), is_replicated

    def _norms_at_once(self, unit: Unit, shard: ParamSlice) -> list[Norm] | None:
        """Return the norms that allow an immediate update of a slice if they are finite; None if it waits."""
        if not shard.group.is_stepped_on_host:
            return self.device.norms_at_once(unit, shard)
        commits = {group.spec.commit for group in unit.trainable if group.is_stepped_on_host}
        if CommitPolicy.IMMEDIATE not in commits or not self.queue.is_queued(unit):
            return None
        return [norm for norm, _ in self._norms[unit.index]]

    def step(self, norm: Tensor, clip: Tensor | None, unseen: set[str]) -> Iterator[tuple[Unit, PendingUpdate | None]]:
        self.auto.check_options()
        for unit in self._queue_updates(norm, unseen):
            self.device.unpublished.add(unit)
        for unit in self.device.update_rest(clip, unseen):
            yield unit, self.queue.arrival(unit)
        self.auto.end_step()

    def _queue_updates(self, norm: Tensor, unseen: set[str]) -> Iterator[Unit]:
        """Queue the updates of this boundary, and settle the updates that were computed before the norm.

        Yields the units that are updated. A unit without a gradient, which all ranks agree on, is left out.
        """
        read = self._context.device.read_async(norm)
        factor = ClipFromNorm(lambda: float(read.get()), read.event, self._scale.value, self._clip)
        options = hyperparameters_of(self.inner)
        for unit in self.slices.units:
            if self.queue.is_queued(unit):
                self.queue.settle(unit, factor, options)
                yield unit
            elif any(g.is_stepped_on_host and g.gradients.result is not None for g in unit.trainable):
                if unit.index not in self._norms:  # gradients that no micro-step added to at the boundary
                    self.queue.offloader.offload(unit, waits=True)
                shards = list(self.slices.seen(unit, unseen, self._split))
                self.queue.start(unit, shards, options, factor)
                yield unit

    def _split(self, unit: Unit, shard: ParamSlice) -> list[ParamSlice]:
        with self.state(unit, changes=True):
            return self.slices.part(unit, shard, self.inner)

    def skip_step(self) -> None:
        self.device.skip_step()

    def drop_gradients(self, was_used: bool | Tensor, *, together: bool) -> None:
        self._norms.clear()
        self.device.drop_gradients(was_used, together=together)

    def describe_partial(self, *, is_late: bool) -> tuple[bool, str]:
        return self.device.describe_partial(is_late=is_late)

    # ---------------------------------------------------------------------------------------------------- state

    def state(self, unit: Unit, *, changes: bool) -> contextlib.AbstractContextManager[None]:
        store = self.queue.store
        return contextlib.nullcontext() if store is None else store.swapped_in(unit, changes=changes)

    def pack_state(self, shard: ParamSlice, state: dict[str, Any]) -> dict[str, Any]:
        return self.queue.kernel.pack_state(state) if shard.group.is_stepped_on_host else state

    def swapped_states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        if self.queue.store is not None:
            yield from self.queue.store.copies(self.slices.units)

    def adopt_states(self) -> None:
        self.device.adopt_states()
        if self.queue.store is not None:
            self.queue.store.adopt(self.slices.units)

    # ---------------------------------------------------------------------------------------------------- units

    def enter(self, unit: Unit) -> None:
        self.device.enter(unit)
        self._exclude(unit)
        self.queue.enter(unit)

    def leave(self, unit: Unit) -> None:
        self.device.leave(unit)
        self.queue.leave(unit)
        self.device.elsewhere.difference_update(unit.trainable)
