"""Updates on the host: optimizer state is in host memory, gradients are copied to it, 16-bit parameters to the device.

    device      | backward 3 | backward 2 | backward 1 | forward 1 | forward 2 | ...
    to host          | grads 3 | grads 2 | grads 1 |
    worker               | update 3 | update 2 | update 1 |
    to device                    | params 3 | params 2 | params 1 |

A worker thread does the updates one after the other; of those that can be done, it takes the one that the next forward
needs first. The training loop waits for a unit's update only when it needs the unit's parameters. The commit policy of
the unit's spec decides when an update may run:

- *at once*: as soon as the gradients are computed. They stay on the device until the copy thread has one of a few
  pinned slots for them, and the training loop waits while too many do.
- *after the norm*: when the norm of all gradients is known, during the next forward. Gradients wait on the host, or on
  disk (`offload/grad_swap.py`).
- *shadow* (speculation): as soon as the gradients are computed, but into other memory. When the norm shows that nothing
  was clipped and everything is finite, that memory becomes the master weights and state; otherwise the unit is stepped
  again, if a step is allowed, from its untouched old state. Code that reads the unit before that revokes the update,
  which then runs after the norm.

All three step a unit by the same arithmetic, from the same state, with the same factor: they give the same bits.

With gradient accumulation the worker also sums the gradients of the micro-steps in host memory.

Master weights and state that are stored on disk are first read into an update buffer by a reader thread, and written
back from there. When it has nothing else to do, the reader reads what the next step will need first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell import kernels
from shardwell.errors import ShardwellError
from shardwell.kernels.rounding import narrow
from shardwell.memory import Event
from shardwell.memory.timing import AllOf, Waitable
from shardwell.offload.cpu_kernels import HostKernel, UpdateTarget
from shardwell.offload.grad_offload import GradientOffloader, GradientTransfer, aligned_size
from shardwell.offload.optimizer_swap import OptimizerSwapper, UpdateBuffer, blank
from shardwell.offload.speculation import Options, SpeculationBackoff, SpeculativeState, are_same, covers
from shardwell.offload.staging import StagingPool
from shardwell.offload.storage import swapped_masters
from shardwell.offload.swapped_tensors import SwappedTensors
from shardwell.offload.worker import TaskHandle, Worker
from shardwell.optim.param_slices import ParamSlice
from shardwell.sharding import EngineContext, ShardedGroup, Unit
from shardwell.sharding.edits import brought_down, edits_of, note_digest, take_over_in_place


class GradientFactor(Protocol):
    """The factor of the gradients, once it is known. The value None means that the step is not applied."""

    @property
    def known(self) -> Event: ...

    def __call__(self) -> float | None: ...


@dataclass(frozen=True)
class SkippedStep:
    """The factor of a step that is not applied."""

    known: Event = field(default_factory=Event)

    def __call__(self) -> float | None:
        return None


@dataclass(frozen=True)
class ClipFromNorm:
    """A gradient factor that unscales, and clips if there is a bound. Its value is None if the norm is not finite."""

    norm: Callable[[], float]
    known: Event
    scale: float
    clip: float = 0.0

    def __call__(self) -> float | None:
        known = self.norm()
        if not math.isfinite(known):
            return None
        clipped = min(self.clip / (known / self.scale + 1e-6), 1.0) if self.clip > 0 else 1.0
        return clipped / self.scale


_CHUNK = 1 << 25  # elements that are updated and then copied to the device, while the next ones are updated
_NOT_URGENT = 1 << 30  # larger than the index of any unit
_NUM_OUT = 2  # slots for parameters that are copied to the device, where the memory of their gradients cannot be used


@dataclass
class HostUpdate:
    """The update of one unit at one boundary."""

    unit: Unit
    shards: list[ParamSlice]
    options: list[Options]  # for each shard: the hyperparameters of this step
    transfer: GradientTransfer
    added: list[TaskHandle]  # the additions that the gradients are the sum of
    after: Event  # passed when the device is done with earlier work, which reads the old parameters
    new: list[ParamSlice]  # the shards that had no state before
    edits: list[tuple[ShardedGroup, Callable[[], bool]]]  # groups whose parameters the user may have edited
    assumed: float | None = None  # the factor that a speculative update assumes
    speculative_state: SpeculativeState | None = None  # the memory of a speculative update
    buffer: UpdateBuffer | None = None  # holds master weights and state that are stored on disk
    up: Event = field(default_factory=Event)  # passed when the parameters are on the device
    tickets: list[TaskHandle] = field(default_factory=list)  # of the update, and of the resolution of a speculation
    final: GradientFactor | None = None  # of a speculation: the factor, set when the step begins
    latest: list[Options] = field(default_factory=list)  # the hyperparameters at the step, set before `final`
    is_settled: bool = False  # the update was done with `final`

    def gradient(self, shard: ParamSlice) -> Tensor:
        """Return the part of the gradient that belongs to a shard."""
        return self.transfer.gradients[shard.group][shard.start : shard.start + shard.tensor.numel()]


@dataclass(frozen=True)
class HostPending:
    """An update in flight, for code that needs the unit's parameters."""

    job: HostUpdate

    @property
    def is_done(self) -> bool:
        """Whether the host has done its part, so that a wait does not block the training loop."""
        return all(ticket.has_passed for ticket in self.job.tickets)

    def wait_local(self) -> None:
        """Wait, without any collective."""
        self.wait()

    def wait(self) -> None:
        """Wait until the update is done and its parameters are on the device."""
        for ticket in self.job.tickets:
            ticket.wait()
        self.job.up.wait()


class HostUpdateQueue:
    """The worker thread and the updates in flight."""

    def __init__(
        self,
        context: EngineContext,
        inner: Optimizer,
        kernel: HostKernel,
        units: list[Unit],
        worker: Worker,
        num_slots: int,
        store: OptimizerSwapper | None,
    ) -> None:
        self._context, self._inner, self.kernel = context, inner, kernel
        self._worker = worker
        self.store = store
        self._reader: Worker | None = None
        if store is not None:
            self._reader = Worker("shardwell reader", gate=store.free_buffers, turns=worker.turns)
        self._jobs: dict[int, HostUpdate] = {}  # of this boundary, by unit
        self.offloader = GradientOffloader(context, units, worker, kernel.threads, num_slots)
        self._outbox = StagingPool(self.offloader.pinned, _NUM_OUT, self.offloader.largest)
        self.speculative_states: dict[int, SpeculativeState] = {}  # by unit
        self.backoff = SpeculationBackoff()
        if store is not None:
            store.measure(units, kernel)
        self._order: list[Unit] = []  # the order in which units with update buffers are updated at this boundary
        self._prefetches: list[TaskHandle] = []  # tasks of the reader for the next boundary

    @property
    def _states(self) -> dict[Tensor, Any]:
        return self._inner.state

    def forget_gradients(self) -> None:
        """Drop the gradients of this boundary; updates in flight are held by their `HostPending`."""
        self._jobs.clear()
        self.offloader.forget()
        self.backoff.end_step()
        self._prefetch_next_step()

    def _prefetch_next_step(self) -> None:
        """Have the reader read ahead, when nothing else is left to read, what the next step updates first."""
        order, self._order = self._order, []
        if self._reader is not None and self.store is not None:
            self._prefetches = [ticket for ticket in self._prefetches if not ticket.has_passed]
            for place, unit in enumerate(order[: self.store.most_ready]):
                prefetch = partial(self.store.prefetch, unit)
                self._prefetches.append(self._reader.submit(prefetch, urgency=_NOT_URGENT + place))

    def _wait_for_prefetches(self) -> None:
        for ticket in self._prefetches:
            with contextlib.suppress(ShardwellError):  # nothing was read ahead
                ticket.wait()

    def bytes_in_advance(self) -> int:
        """Return the bytes that were read ahead for the next step; wait until the reader has nothing left to do."""
        self._wait_for_prefetches()
        return self.store.ready_bytes if self.store is not None else 0

    def cancel_prefetches(self) -> None:
        """Release what was read ahead, because units change."""
        self._wait_for_prefetches()
        if self.store is not None:
            self.store.cancel_prefetches()

    def enter(self, unit: Unit) -> None:
        """Add a unit that was rebuilt."""
        self.offloader.enter(unit)
        if self.store is not None:
            self.store.add(unit)

    def leave(self, unit: Unit) -> None:
        """Forget a unit, and free what was kept for its updates."""
        self.cancel_prefetches()
        self.drop_speculative_state(unit)
        for group in unit.trainable:
            self.offloader.leave(group)
        if self.store is not None:
            self.store.forget(unit)

    # --------------------------------------------------------------------------------------------------- updates

    def start(
        self,
        unit: Unit,
        shards: list[ParamSlice],
        options: list[Options],
        factor: GradientFactor,
        assumed: float | None = None,
    ) -> None:
        """Queue the update of a unit; `options` has the hyperparameters of each parameter group.

        With `assumed` the update is speculative: it uses that factor, in other memory, until `factor` is known.
        """
        unit.cancel_prefetch()  # a prefetch would become stale, and the reader would wait for it
        ready = [s for s in shards if s.group.is_stepped_on_host and s.label >= 0 and s.gradient is not None]
        new = [shard for shard in ready if shard.tensor not in self._states]
        for shard in new:
            self._states[shard.tensor] = self._initial_state(shard, options[shard.label])
        if self.store is not None:
            self.store.add(unit)
        results = {shard.group: shard.group.gradients.result for shard in ready}
        transfer, added = self.offloader.take(unit, {g: result for g, result in results.items() if result is not None})
        own = [options[shard.label] for shard in ready]
        edits = edits_of({shard.group: None for shard in ready})
        after = self._context.device.now()
        job = self._jobs[unit.index] = HostUpdate(unit, ready, own, transfer, added, after, new, edits, assumed)
        begin = factor.known if assumed is None and not added else self.offloader.down_after(transfer, added)
        job.tickets.append(self._worker.new_handle())
        if ready and self.store is not None and self._reader is not None and self.store.needs_buffer(unit):
            self._order.append(unit)
            self._reader.submit(lambda: self._fetch(job, factor, begin), urgency=unit.index)
        else:
            self._pass_on(job, factor, begin)

    def _initial_state(self, shard: ParamSlice, options: Options) -> dict[str, Any]:
        """Return the state before the first step."""
        if swapped_masters(shard.group) is None:
            return self.kernel.initial_state(shard.tensor, options)
        one = torch.empty(1, dtype=shard.tensor.dtype, device=self._context.device.host)
        return blank(self.kernel.initial_state(one, options), shard)

    def _fetch(self, job: HostUpdate, factor: GradientFactor, after: Waitable) -> None:
        """Read master weights and state from disk. This runs on the reader thread."""
        assert self.store is not None
        try:
            job.buffer = self.store.acquire(job.unit, job.shards, self._gradients_of(job))
        except BaseException as error:
            self._fail(job, error)
            return
        self._pass_on(job, factor, after)

    def _gradients_of(self, job: HostUpdate) -> SwappedTensors | None:
        """Return the swapped tensors of the gradients; if they are lost, release the reader's update buffer."""
        assert self.store is not None
        try:
            return None if job.transfer.swapped is None else job.transfer.swapped.ready()
        except BaseException:
            self.store.free_buffers.release()
            raise

    def _pass_on(self, job: HostUpdate, factor: GradientFactor, after: Waitable) -> None:
        """Pass the update to the worker, or to the copy thread first."""
        if not job.transfer.is_on_device:
            self._submit(job, factor, after)
            return
        self.offloader.copy_when_slot_free(
            job.transfer,
            job.unit.index,
            after,
            then=lambda: self._submit(job, factor, job.transfer.down),
            fail=lambda error: self._fail(job, error),
        )

    def _fail(self, job: HostUpdate, error: BaseException) -> None:
        self.offloader.give_up(job.transfer)
        self._release_buffer(job, changed=False)
        job.tickets[0].fail(error)

    def _submit(self, job: HostUpdate, factor: GradientFactor, after: Waitable) -> None:
        work = partial(self._work, job, factor)
        ready = after if job.buffer is None else AllOf([*job.buffer.reads, after])
        self._worker.submit(work, urgency=job.unit.index, after=ready, ticket=job.tickets[0])

    def _release_buffer(self, job: HostUpdate, *, changed: bool) -> None:
        buffer, job.buffer = job.buffer, None
        if buffer is not None and self.store is not None:
            self.store.release(buffer, changed=changed)

    def _work(self, job: HostUpdate, factor: GradientFactor) -> None:
        is_stepped = False
        try:
            self.offloader.begin(job.transfer)
            for ticket in job.added:
                ticket.wait()
            if job.buffer is not None:
                job.buffer.wait()
            if job.final is not None and job.final.known.is_done:
                job.assumed, job.is_settled, factor = None, True, job.final  # too late to speculate
                job.options = job.latest
            self._take_over_edits(job)
            if job.assumed is not None:
                job.speculative_state = self._speculative_state_of(job)
                self._step(job, job.assumed)
            elif (known := factor()) is not None:
                self._step(job, known)
                self._advance(job)
                is_stepped = True
        finally:
            self.offloader.end(job.transfer, job.up)
            self._release_buffer(job, changed=is_stepped)

    @torch.no_grad()
    def _take_over_edits(self, job: HostUpdate) -> None:
        """Take values that the user edited since the last update as the master weights of this update."""
        for group, may_be in job.edits:
            if may_be():
                take_over_in_place(group, brought_down(group, job.after))

    @torch.no_grad()
    def _step(self, job: HostUpdate, factor: float) -> None:
        outs, slot = self._outs(job)
        try:
            for shard, options, out in zip(job.shards, job.options, outs, strict=True):
                new = job.speculative_state.spares[shard] if job.speculative_state is not None else None
                target, gradient = UpdateTarget(options, factor, out, new), job.gradient(shard)
                for span in _chunks(shard.tensor.numel()):
                    self.kernel.step(_master(shard), gradient, self._states[shard.tensor], target, span)
                    job.up = shard.group.send_up(out[span], shard.start + span.start, job.after)  # one stream: in order
                    if slot is None:  # a task that is let in may need one
                        self._worker.let_in(job.unit.index)
            self._note_digests(job)
        finally:
            if slot is not None:
                self._outbox.give(slot, job.up)

    def _note_digests(self, job: HostUpdate) -> None:
        with self._context.device.upload_stream.after(job.up):
            for group, _ in job.edits:
                note_digest(group)
        job.up = self._context.device.upload_stream.record()  # code that waits for `up` compares the digests next

    def _outs(self, job: HostUpdate) -> tuple[list[Tensor], Tensor | None]:
        """Return a 1D output in the compute dtype for each shard's updated parameters, and the slot that holds them.

        Parameters in host memory are updated where they are stored. Otherwise the output is the memory of the
        gradients, unless those are still needed or have another size.
        """
        dtypes = [shard.group.precision.compute for shard in job.shards]
        if not any(shard.group.is_stored_on_device for shard in job.shards):
            return [shard.group.storage.parameters[shard.start :][: shard.tensor.numel()] for shard in job.shards], None
        gradients = [job.gradient(shard) for shard in job.shards]
        same_size = all(g.dtype.itemsize == dtype.itemsize for g, dtype in zip(gradients, dtypes, strict=True))
        if job.assumed is None and same_size and not job.added and job.transfer.swapped is None:
            return [gradient.view(dtype) for gradient, dtype in zip(gradients, dtypes, strict=True)], None
        numels = [shard.tensor.numel() for shard in job.shards]
        sizes = [aligned_size(numel * dtype.itemsize) for numel, dtype in zip(numels, dtypes, strict=True)]
        slot = self._outbox.take(sum(sizes))
        parts = slot[: sum(sizes)].split(sizes)
        return [part.view(d)[:n] for part, d, n in zip(parts, dtypes, numels, strict=True)], slot

    def _advance(self, job: HostUpdate) -> None:
        for shard in job.shards:
            self.kernel.advance(self._states[shard.tensor])

    def is_queued(self, unit: Unit) -> bool:
        """Return whether the unit's update of this boundary was queued, possibly before the norm is known."""
        return unit.index in self._jobs

    def arrival(self, unit: Unit) -> HostPending | None:
        """Return what to wait for before a unit's parameters are used; None if nothing was queued."""
        job = self._jobs.get(unit.index)
        return None if job is None else HostPending(job)

    # ----------------------------------------------------------------------------------------------- speculation

    def may_speculate(self, shards: list[ParamSlice]) -> bool:
        """Return whether to speculate at this step, and whether a commit is possible for these shards."""
        mine = [shard for shard in shards if shard.group.is_stepped_on_host and shard.label >= 0]
        return self.backoff.may_speculate and covers(mine)

    def _speculative_state_of(self, job: HostUpdate) -> SpeculativeState:
        found = self.speculative_states.get(job.unit.index)
        if found is None or not found.fits(job.shards):
            self.drop_speculative_state(job.unit)
            found = SpeculativeState(job.unit, job.shards, self._states, self._context.memory_stats)
            self.speculative_states[job.unit.index] = found
        return found

    def drop_speculative_state(self, unit: Unit) -> None:
        """Free the memory of a unit's speculative updates."""
        found = self.speculative_states.pop(unit.index, None)
        if found is not None:
            found.strike_out()

    def settle(self, unit: Unit, factor: GradientFactor, options: list[Options]) -> None:
        """Queue the resolution of a speculation: the update is kept, or is done again with these `options`."""
        job = self._jobs[unit.index]
        if job.assumed is not None and job.final is None:
            self._settle(job, factor, [options[shard.label] for shard in job.shards])

    def give_up(self, unit: Unit) -> None:
        """Do not apply a unit's speculative update."""
        job = self._jobs.get(unit.index)
        if job is not None and job.assumed is not None and job.final is None:
            self._settle(job, SkippedStep(), job.options)

    def revoke(self, unit: Unit) -> None:
        """Revoke a unit's speculative update, as if it had not begun, because the unit is read before the step.

        Its gradients stay where they are. The call waits until the old parameters are on the device again.
        """
        job = self._jobs.get(unit.index)
        if job is None or job.assumed is None or job.final is not None:
            return
        self.give_up(unit)
        del self._jobs[unit.index]
        self.backoff.note_failure()
        HostPending(job).wait()
        for shard in job.new:
            self._states.pop(shard.tensor, None)

    def _settle(self, job: HostUpdate, factor: GradientFactor, options: list[Options]) -> None:
        job.latest, job.final = options, factor
        resolve = partial(self._resolve, job, factor)
        job.tickets.append(self._worker.submit(resolve, urgency=job.unit.index, after=factor.known))

    @torch.no_grad()
    def _resolve(self, job: HostUpdate, factor: GradientFactor) -> None:
        if job.is_settled or not job.tickets[0].has_passed:
            return  # or it will be settled: the update runs later, and knows the factor by then
        job.tickets[0].wait()
        known = factor()
        found, job.speculative_state = job.speculative_state, None
        assert found is not None
        if known == job.assumed and are_same(job.options, job.latest):
            found.commit(self._states)
            self._advance(job)
            return
        self.backoff.note_failure()
        if known is not None:
            job.options = job.latest
            self._step(job, known)
            self._advance(job)
        else:
            self._restore(job)

    def _restore(self, job: HostUpdate) -> None:
        """Copy the old parameters to the device again."""
        outs, slot = self._outs(job)
        for shard, out in zip(job.shards, outs, strict=True):
            narrow(shard.tensor, out)
            job.up = shard.group.send_up(out, shard.start, job.after)
        self._note_digests(job)
        if slot is not None:
            self._outbox.give(slot, job.up)


def _master(shard: ParamSlice) -> Tensor | kernels.SplitMaster:
    """Return the master weights as they are stored: bf16 plus remainder is never joined here."""
    if shard.group.split_master is None:
        return shard.tensor
    high, low = shard.group.split_master
    span = slice(shard.start, shard.start + shard.tensor.numel())
    return kernels.SplitMaster(high[span], low[span])


def _chunks(numel: int) -> Iterator[slice]:
    for start in range(0, numel, _CHUNK):
        yield slice(start, min(start + _CHUNK, numel))
