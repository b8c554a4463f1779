"""Updates on the host: optimizer state rests in host memory, gradients come down, 16-bit parameters go up.

    device      | backward 3 | backward 2 | backward 1 | forward 1 | forward 2 | ...
    down             | grads 3 | grads 2 | grads 1 |
    worker               | update 3 | update 2 | update 1 |
    up                           | params 3 | params 2 | params 1 |

A worker does the updates one after the other, of those that can be done the one that the next forward needs first. The
training loop waits for a unit's update only when it needs the unit's parameters. When an update may run is its row's
commit policy:

- *at once*: as soon as the gradients are made; they stay on the device until a porter has one of a few pinned slots for
  them, and the training loop waits while too many do
- *after the norm*: when the norm of all gradients is known, under the next forward; gradients wait on the host,
  or on disk (`offload/grad_swap.py`)
- *shadow*: at once, but in other memory; when the norm shows that nothing was clipped and everything is finite, that
  memory becomes the truth, otherwise the unit is stepped again, if it may be, from its untouched old state. Whoever
  looks at the unit before that takes the update back, and it comes after the norm

All three step a unit by the same arithmetic, from the same state, with the same factor: they give the same bits.

With accumulation the worker also adds up the gradients of the micro-steps, in host memory.

Masters and state of a unit that rest on disk are first brought into a seat by a reader, and written back from there. In
its spare time the reader brings what the next step will need first.
"""

from __future__ import annotations

import contextlib
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
from shardwell.memory.device import AllOf, Waitable
from shardwell.offload.cpu_kernels import HostKernel, UpdateTarget
from shardwell.offload.grad_offload import GradientOffloader, GradientTransfer, aligned_size
from shardwell.offload.optimizer_swap import OptimizerSwapper, UpdateBuffer, blank
from shardwell.offload.speculation import Options, SpeculationBackoff, SpeculativeState, are_same, covers
from shardwell.offload.staging import StagingPool
from shardwell.offload.swapped_tensors import SwappedTensors
from shardwell.offload.worker import TaskHandle, Worker
from shardwell.optim.param_slices import ParamSlice
from shardwell.sharding import EngineContext, ShardedGroup, Unit
from shardwell.sharding.edits import brought_down, edits_of, note_digest, take_over_in_place


class GradientFactor(Protocol):
    """What gradients are multiplied by, once it is known; None: the step is not applied."""

    @property
    def known(self) -> Event: ...

    def __call__(self) -> float | None: ...


@dataclass(frozen=True)
class SkippedStep:
    """The step is not applied."""

    known: Event = field(default_factory=Event)

    def __call__(self) -> float | None:
        return None


_CHUNK = 1 << 25  # elements that are updated and then sent up, while the next ones are updated
_NOT_URGENT = 1 << 30  # more than the number of any unit
_NUM_OUT = 2  # slots for parameters on their way up, where those of their gradients do not serve


@dataclass
class HostUpdate:
    """One unit's update at one boundary."""

    unit: Unit
    shards: list[ParamSlice]
    options: list[Options]  # of each shard: the hyperparameters of this step
    parcel: GradientTransfer
    added: list[TaskHandle]  # what the gradients are the sum of
    after: Event  # what the device was given before: it still reads the old parameters
    born: list[ParamSlice]  # those that had no state before
    edits: list[tuple[ShardedGroup, Callable[[], bool]]]  # whose parameters may have been changed by hand
    assumed: float | None = None  # the factor of an update that was done before the norm was known
    shadow: SpeculativeState | None = None  # where that went
    seat: UpdateBuffer | None = None  # where masters and state are that rest on disk
    up: Event = field(default_factory=Event)  # passed when the parameters are on the device
    tickets: list[TaskHandle] = field(default_factory=list)  # of the update, and of what became of a speculation
    final: GradientFactor | None = None  # of a speculation, when the norm is asked for
    latest: list[Options] = field(default_factory=list)  # the hyperparameters of then, set before `final`
    is_settled: bool = False  # the update was done with that

    def gradient(self, shard: ParamSlice) -> Tensor:
        return self.parcel.gradients[shard.group][shard.start : shard.start + shard.tensor.numel()]


@dataclass(frozen=True)
class HostPending:
    """An update that is on its way, for who needs the unit's parameters."""

    job: HostUpdate

    @property
    def is_done(self) -> bool:
        """The host has done its part: whoever waits now does not hold up the training loop."""
        return all(ticket.has_passed for ticket in self.job.tickets)

    def wait_local(self) -> None:
        """Wait, as a rank can alone."""
        self.wait()

    def wait(self) -> None:
        for ticket in self.job.tickets:
            ticket.wait()
        self.job.up.wait()


class HostUpdateQueue:
    """The worker, and what is on its way."""

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
        self._reader = Worker("shardwell reader", gate=store.free_seats) if store is not None else None
        self._jobs: dict[int, HostUpdate] = {}  # of this boundary, by unit
        self.descent = GradientOffloader(context, units, worker, kernel.threads, num_slots)
        self._outbox = StagingPool(self.descent.pinned, _NUM_OUT, self.descent.largest)
        self.shadows: dict[int, SpeculativeState] = {}  # by unit
        self.caution = SpeculationBackoff()
        if store is not None:
            store.measure(units, kernel)
        self._order: list[Unit] = []  # in which units with seats are updated at this boundary
        self._prepared: list[TaskHandle] = []  # of what the reader does for the next one

    @property
    def _states(self) -> dict[Tensor, Any]:
        return self._inner.state

    def forget_gradients(self) -> None:
        """The next micro-step begins new sums; who waits for an update of this boundary has its arrival."""
        self._jobs.clear()
        self.descent.forget()
        self.caution.end_step()
        self._prepare_the_next()

    def _prepare_the_next(self) -> None:
        """When nothing is left to read, the reader brings what the next step will update first."""
        order, self._order = self._order, []
        if self._reader is not None and self.store is not None:
            self._prepared = [ticket for ticket in self._prepared if not ticket.has_passed]
            for place, unit in enumerate(order[: self.store.most_ready]):
                guess = partial(self.store.prepare, unit)
                self._prepared.append(self._reader.submit(guess, urgency=_NOT_URGENT + place))

    def _wait_for_guesses(self) -> None:
        for ticket in self._prepared:
            with contextlib.suppress(ShardwellError):  # it came to nothing
                ticket.wait()

    def bytes_in_advance(self) -> int:
        """What was read for the next step already; waits until the reader has nothing left to do."""
        self._wait_for_guesses()
        return self.store.ready_bytes if self.store is not None else 0

    def forget_guesses(self) -> None:
        """Units change: what was read in advance is given up."""
        self._wait_for_guesses()
        if self.store is not None:
            self.store.let_all_go()

    # --------------------------------------------------------------------------------------------------- updates

    def start(
        self,
        unit: Unit,
        shards: list[ParamSlice],
        options: list[Options],
        factor: GradientFactor,
        assumed: float | None = None,
    ) -> None:
        """Queue a unit's update; `options` are those of each parameter group.

        With `assumed` it is done with that factor in other memory, until it is known whether `factor` is another.
        """
        unit.cancel_prefetch()  # what was fetched ahead will be old, and the reader would wait for what is being read
        ready = [s for s in shards if s.group.is_stepped_on_host and s.label >= 0 and s.gradient is not None]
        born = [shard for shard in ready if shard.tensor not in self._states]
        for shard in born:
            self._states[shard.tensor] = self._born(shard, options[shard.label])
        if self.store is not None:
            self.store.take_in(unit)
        results = {shard.group: shard.group.gradients.result for shard in ready}
        parcel, added = self.descent.take(unit, {g: result for g, result in results.items() if result is not None})
        own = [options[shard.label] for shard in ready]
        edits = edits_of({shard.group: None for shard in ready})
        after = self._context.device.now()
        job = self._jobs[unit.index] = HostUpdate(unit, ready, own, parcel, added, after, born, edits, assumed)
        begin = factor.known if assumed is None and not added else self.descent.down_after(parcel, added)
        job.tickets.append(TaskHandle())
        if ready and self.store is not None and self._reader is not None and self.store.seats(unit):
            self._order.append(unit)
            self._reader.submit(lambda: self._fetch(job, factor, begin), urgency=unit.index)
        else:
            self._pass_on(job, factor, begin)

    def _born(self, shard: ParamSlice, options: Options) -> dict[str, Any]:
        """The state before the first step."""
        if shard.group.chest is None:
            return self.kernel.born(shard.tensor, options)
        return blank(self.kernel.born(torch.empty(1, dtype=shard.tensor.dtype, device="cpu"), options), shard)

    def _fetch(self, job: HostUpdate, factor: GradientFactor, after: Waitable) -> None:
        """The reader's work: bring masters and state from the disk."""
        assert self.store is not None
        try:
            job.seat = self.store.seat(job.unit, job.shards, self._gradients_of(job))
        except BaseException as error:
            self._fail(job, error)
            return
        self._pass_on(job, factor, after)

    def _gradients_of(self, job: HostUpdate) -> SwappedTensors | None:
        """What they wait in on disk; the seat that the reader was let in for is given up if they are lost."""
        assert self.store is not None
        try:
            return None if job.parcel.away is None else job.parcel.away.ready()
        except BaseException:
            self.store.free_seats.release()
            raise

    def _pass_on(self, job: HostUpdate, factor: GradientFactor, after: Waitable) -> None:
        """To the worker, or to the porter first."""
        if not job.parcel.is_above:
            self._submit(job, factor, after)
            return
        self.descent.carry(
            job.parcel,
            job.unit.index,
            after,
            then=lambda: self._submit(job, factor, job.parcel.down),
            fail=lambda error: self._fail(job, error),
        )

    def _fail(self, job: HostUpdate, error: BaseException) -> None:
        self.descent.give_up(job.parcel)
        self._clear_seat(job, changed=False)
        job.tickets[0].fail(error)

    def _submit(self, job: HostUpdate, factor: GradientFactor, after: Waitable) -> None:
        work = partial(self._work, job, factor)
        ready = after if job.seat is None else AllOf([*job.seat.reads, after])
        self._worker.submit(work, urgency=job.unit.index, after=ready, ticket=job.tickets[0])

    def _clear_seat(self, job: HostUpdate, *, changed: bool) -> None:
        seat, job.seat = job.seat, None
        if seat is not None and self.store is not None:
            self.store.clear(seat, changed=changed)

    def _work(self, job: HostUpdate, factor: GradientFactor) -> None:
        is_stepped = False
        try:
            self.descent.begin(job.parcel)
            for ticket in job.added:
                ticket.wait()
            if job.seat is not None:
                job.seat.wait()
            if job.final is not None and job.final.known.is_done:
                job.assumed, job.is_settled, factor = None, True, job.final  # too late to speculate
                job.options = job.latest
            self._take_over_edits(job)
            if job.assumed is not None:
                job.shadow = self._shadow_of(job)
                self._step(job, job.assumed)
            elif (known := factor()) is not None:
                self._step(job, known)
                self._advance(job)
                is_stepped = True
        finally:
            self.descent.end(job.parcel, job.up)
            self._clear_seat(job, changed=is_stepped)

    @torch.no_grad()
    def _take_over_edits(self, job: HostUpdate) -> None:
        """What was changed by hand since the last update is the truth that this one begins with."""
        for group, may_be in job.edits:
            if may_be():
                take_over_in_place(group, brought_down(group, job.after))

    @torch.no_grad()
    def _step(self, job: HostUpdate, factor: float) -> None:
        outs, slot = self._outs(job)
        try:
            for shard, options, out in zip(job.shards, job.options, outs, strict=True):
                new = job.shadow.spares[shard] if job.shadow is not None else None
                target, gradient = UpdateTarget(options, factor, out, new), job.gradient(shard)
                for span in _chunks(shard.tensor.numel()):
                    self.kernel.step(_master(shard), gradient, self._states[shard.tensor], target, span)
                    job.up = shard.group.send_up(out[span], shard.start + span.start, job.after)  # one lane: in order
                    if slot is None:  # who is let in may need one
                        self._worker.let_in(job.unit.index)
            self._note_digests(job)
        finally:
            if slot is not None:
                self._outbox.give(slot, job.up)

    def _note_digests(self, job: HostUpdate) -> None:
        with self._context.device.upload_stream.after(job.up):
            for group, _ in job.edits:
                note_digest(group)
        job.up = self._context.device.upload_stream.record()  # who waits for it compares with them next

    def _outs(self, job: HostUpdate) -> tuple[list[Tensor], Tensor | None]:
        """Where each shard's updated parameters are written, 1D in the compute dtype; and the slot that they are in.

        In host memory that is where they rest. Otherwise it is the memory that their gradients came in, unless those
        are still needed or of another size.
        """
        dtypes = [shard.group.precision.compute for shard in job.shards]
        if not any(shard.group.at_rest.is_cuda for shard in job.shards):
            return [shard.group.at_rest[shard.start :][: shard.tensor.numel()] for shard in job.shards], None
        gradients = [job.gradient(shard) for shard in job.shards]
        same_size = all(g.dtype.itemsize == dtype.itemsize for g, dtype in zip(gradients, dtypes, strict=True))
        if job.assumed is None and same_size and not job.added and job.parcel.away is None:
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
        """Whether its update of this boundary was queued; before the norm is known: ahead of that."""
        return unit.index in self._jobs

    def arrival(self, unit: Unit) -> HostPending | None:
        """What has to be waited for before a unit's parameters are used; None if nothing was queued."""
        job = self._jobs.get(unit.index)
        return None if job is None else HostPending(job)

    # --------------------------------------------------------------------------------------------------- shadows

    def may_speculate(self, shards: list[ParamSlice]) -> bool:
        mine = [shard for shard in shards if shard.group.is_stepped_on_host and shard.label >= 0]
        return self.caution.may_speculate and covers(mine)

    def _shadow_of(self, job: HostUpdate) -> SpeculativeState:
        shadow = self.shadows.get(job.unit.index)
        if shadow is None or not shadow.fits(job.shards):
            self.drop_shadow(job.unit)
            shadow = SpeculativeState(job.unit, job.shards, self._states, self._context.account)
            self.shadows[job.unit.index] = shadow
        return shadow

    def drop_shadow(self, unit: Unit) -> None:
        """Free a unit's other memory."""
        shadow = self.shadows.pop(unit.index, None)
        if shadow is not None:
            shadow.strike_out()

    def settle(self, unit: Unit, factor: GradientFactor, options: list[Options]) -> None:
        """Queue what follows when the norm is known: what was done stands, or is done again with these `options`."""
        job = self._jobs[unit.index]
        if job.assumed is not None and job.final is None:
            self._settle(job, factor, [options[shard.label] for shard in job.shards])

    def give_up(self, unit: Unit) -> None:
        """What was done in other memory is not applied."""
        job = self._jobs.get(unit.index)
        if job is not None and job.assumed is not None and job.final is None:
            self._settle(job, SkippedStep(), job.options)

    def take_back(self, unit: Unit) -> None:
        """Somebody looks at a unit before the step: what was done in other memory is as if it had not begun.

        Its gradients stay where they are. Waits until the old parameters are on the device again.
        """
        job = self._jobs.get(unit.index)
        if job is None or job.assumed is None or job.final is not None:
            return
        self.give_up(unit)
        del self._jobs[unit.index]
        self.caution.note_failure()
        HostPending(job).wait()
        for shard in job.born:
            self._states.pop(shard.tensor, None)

    def _settle(self, job: HostUpdate, factor: GradientFactor, options: list[Options]) -> None:
        job.latest, job.final = options, factor
        resolve = partial(self._resolve, job, factor)
        job.tickets.append(self._worker.submit(resolve, urgency=job.unit.index, after=factor.known))

    @torch.no_grad()
    def _resolve(self, job: HostUpdate, factor: GradientFactor) -> None:
        if job.is_settled or not job.tickets[0].has_passed:
            return  # or will be: the update comes later, and knows the factor by then
        job.tickets[0].wait()
        known = factor()
        shadow, job.shadow = job.shadow, None
        assert shadow is not None
        if known == job.assumed and are_same(job.options, job.latest):
            shadow.commit(self._states)
            self._advance(job)
            return
        self.caution.note_failure()
        if known is not None:
            job.options = job.latest
            self._step(job, known)
            self._advance(job)
        else:
            self._restore(job)

    def _restore(self, job: HostUpdate) -> None:
        """Send the old parameters up again."""
        outs, slot = self._outs(job)
        for shard, out in zip(job.shards, outs, strict=True):
            narrow(shard.tensor, out)
            job.up = shard.group.send_up(out, shard.start, job.after)
        self._note_digests(job)
        if slot is not None:
            self._outbox.give(slot, job.up)


def _master(shard: ParamSlice) -> Tensor | kernels.SplitMaster:
    """Where it rests: halves are never joined here."""
    if shard.group.split_master is None:
        return shard.tensor
    high, low = shard.group.split_master
    stretch = slice(shard.start, shard.start + shard.tensor.numel())
    return kernels.SplitMaster(high[stretch], low[stretch])


def _chunks(numel: int) -> Iterator[slice]:
    for start in range(0, numel, _CHUNK):
        yield slice(start, min(start + _CHUNK, numel))
