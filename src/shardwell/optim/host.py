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
- *after the norm*: when the norm of all gradients is known, under the next forward; gradients wait on the host
- *shadow*: at once, but in other memory; when the norm shows that nothing was clipped and everything is finite, that
  memory becomes the truth, otherwise the unit is stepped again, if it may be, from its untouched old state

All three step a unit by the same arithmetic, from the same state, with the same factor: they give the same bits.

With accumulation the worker also adds up the gradients of the micro-steps, in host memory.

Masters and state of a unit that rest on disk are first brought into a seat by a reader, and written back from there.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell import native
from shardwell.errors import ShardwellError
from shardwell.memory import Mark, State, Tier
from shardwell.memory.device import All, Passing
from shardwell.memory.mail import Backlog, Pinned, Slots
from shardwell.memory.worker import Ticket, Worker
from shardwell.optim.kernels import Kernel, Target
from shardwell.optim.shards import Shard
from shardwell.optim.speculation import Caution, Shadow, covers
from shardwell.optim.store import Seat, Store, blank
from shardwell.rounding import narrow
from shardwell.unit import Context, Group, Unit
from shardwell.unit.table import ReduceAt


class Factor(Protocol):
    """What gradients are multiplied by, once it is known; None: the step is not applied."""

    @property
    def known(self) -> Mark: ...

    def __call__(self) -> float | None: ...


_NOW = -1  # more urgent than any unit
_ALIGNMENT = 64  # bytes
_CHUNK = 1 << 25  # elements that are updated and then sent up, while the next ones are updated
_NUM_LEAVING = 1  # gradients that are being copied while the next unit's are made
_SHARE_ABOVE = 1 / 32  # of the device: gradients that may wait there for the host
_NUM_OUT = 2  # slots for parameters on their way up, where those of their gradients do not serve


def is_stepped_on_host(group: Group) -> bool:
    """Its optimizer state rests there, or on disk."""
    return group.trainable and group.row.optimizer.tier is not Tier.DEVICE


@dataclass
class Parcel:
    """A unit's gradients on their way down."""

    gradients: dict[Group, Tensor]  # 1D: where they are now
    down: Mark = field(default_factory=Mark)  # passed when they are in host memory
    slot: Tensor | None = None  # pinned memory that they lie in, and that is not theirs for good
    is_above: bool = False  # they are still on the device


@dataclass
class Job:
    """One unit's update at one boundary."""

    unit: Unit
    shards: list[Shard]
    options: list[dict[str, Any]]  # of each shard: the hyperparameters of this step
    parcel: Parcel
    added: list[Ticket]  # what the gradients are the sum of
    after: Mark  # what the device was given before: it still reads the old parameters
    assumed: float | None = None  # the factor of an update that was done before the norm was known
    shadow: Shadow | None = None  # where that went
    seat: Seat | None = None  # where masters and state are that rest on disk
    up: Mark = field(default_factory=Mark)  # passed when the parameters are on the device
    tickets: list[Ticket] = field(default_factory=list)  # of the update, and of what became of a speculation
    final: Factor | None = None  # of a speculation, when the norm is asked for
    is_settled: bool = False  # the update was done with that

    def gradient(self, shard: Shard) -> Tensor:
        return self.parcel.gradients[shard.group][shard.start : shard.start + shard.tensor.numel()]


class HostUpdates:
    """The worker, and what is on its way."""

    def __init__(
        self,
        context: Context,
        inner: Optimizer,
        kernel: Kernel,
        units: list[Unit],
        worker: Worker,
        num_slots: int,
        store: Store | None,
    ) -> None:
        self._context, self._inner, self.kernel = context, inner, kernel
        self._worker = worker
        self.store = store
        self._reader = Worker("shardwell reader", gate=store.free_seats) if store is not None else None
        self._jobs: dict[int, Job] = {}  # of this boundary, by unit
        self._parcels: dict[int, Parcel] = {}  # by unit: gradients that no job has yet
        self._leaving: deque[tuple[Mark | Ticket, Tensor]] = deque()  # device memory that is still read
        self._pinned = Pinned(context.device, context.account)
        largest = max(
            sum(_param_bytes(group) for group in unit.trainable if is_stepped_on_host(group)) for unit in units
        )
        self._ahead = threading.Semaphore(max(1, num_slots - 2))  # units to bring down before they are updated
        self._porter = Worker("shardwell porter", gate=self._ahead)
        self._above = Backlog(max(2 * largest, int(_SHARE_ABOVE * context.device.most_bytes())))
        self._slots = Slots(self._pinned, num_slots, largest)  # for the porter
        self._inbox = Slots(self._pinned, num_slots, largest)  # for the training loop: what is to be added
        self._outbox = Slots(self._pinned, _NUM_OUT, largest)
        self._kept: dict[int, Tensor] = {}  # by unit: pinned memory for gradients that wait
        self._totals: dict[Group, Tensor] = {}  # gradients of several micro-steps, added up
        self._adding: dict[Group, Ticket] = {}  # of this boundary: the last that was added
        self._last_sum = Mark()  # passed when all that is to be added is down
        self.shadows: dict[int, Shadow] = {}  # by unit
        self.caution = Caution()
        if store is not None:
            store.expect(units, kernel)
        for unit in units:
            self.enter(unit)

    def enter(self, unit: Unit) -> None:
        """Take in a unit."""
        for group in unit.trainable:
            group.gradients.hands_over = is_stepped_on_host(group) and group.row.reduce_at is ReduceAt.MICRO_STEP

    def leave(self, group: Group) -> None:
        """Let go of a group, whose state will rest elsewhere."""
        group.gradients.hands_over = False
        total = self._totals.pop(group, None)
        if total is not None:
            self._context.account.remove(State.GRADIENTS, group.unit, Tier.HOST, total.nbytes)

    @property
    def _states(self) -> dict[Tensor, Any]:
        return self._inner.state

    # ------------------------------------------------------------------------------------------------- gradients

    def bring_down(self, unit: Unit, *, waits: bool) -> None:
        """Take a unit's averaged gradients; those of a unit that `waits` for the norm are moved to the host now."""
        self._let_go(_NUM_LEAVING)
        found = {g: g.gradients.result for g in unit.trainable if is_stepped_on_host(g) and g not in self._adding}
        above = {group: result for group, result in found.items() if result is not None and result.is_cuda}
        if not above:
            return
        if not waits:
            self._above.add(sum(_sizes(above)))
            self._parcels[unit.index] = Parcel(above, is_above=True)
            for group, result in above.items():
                group.gradients.lodge(result.new_empty(0), _gone)  # the worker's from now on
            return
        memory = self._keep(unit, sum(_sizes(above)))
        parcel = self._parcels[unit.index] = Parcel(dict(above))
        self._send_down(parcel, above, memory, self._context.device.copies.after_current())
        for group, copy in parcel.gradients.items():
            group.gradients.lodge(copy, parcel.down.synchronize)
            self._leaving.append((parcel.down, above[group]))

    def _send_down(
        self,
        parcel: Parcel,
        above: dict[Group, Tensor],
        memory: Tensor,
        lane: contextlib.AbstractContextManager[None],
    ) -> None:
        """Start copying gradients to pinned memory."""
        sizes = _sizes(above)
        with lane, torch.no_grad():
            parts = memory[: sum(sizes)].split(sizes)
            for (group, gradient), part in zip(above.items(), parts, strict=True):
                parcel.gradients[group] = group.send_down(gradient, part)
        parcel.down = self._context.device.copies.mark()

    def _keep(self, unit: Unit, num_bytes: int) -> Tensor:
        if unit.index in self._kept and self._kept[unit.index].numel() < num_bytes:
            self._pinned.drop(self._kept.pop(unit.index), unit.name)
        if unit.index not in self._kept:
            self._kept[unit.index] = self._pinned.make(num_bytes, unit.name)
        return self._kept[unit.index]

    def _let_go(self, but: int) -> None:
        """Free what was copied from, but for the last ones: who gets that memory next is ordered behind the copy."""
        while len(self._leaving) > but:
            passed, memory = self._leaving[0]
            if isinstance(passed, Mark):
                passed.wait()
            elif not passed.has_passed:
                return
            self._context.scratch.give(memory)
            self._leaving.popleft()

    def add_up(self, unit: Unit) -> None:
        """Add what a micro-step gave to the sums on the host, if there is something that belongs there."""
        self._let_go(_NUM_LEAVING)
        handed = {group: group.gradients.hand_over() for group in unit.trainable}
        new = {group: one for group, one in handed.items() if one is not None}
        if not new:
            return
        above = {group: tensor for group, (tensor, _) in new.items()}
        parcel = Parcel(dict(above))
        if self._context.device.is_cuda:
            parcel.slot = self._inbox.take(sum(_sizes(above)))
            self._send_down(parcel, above, parcel.slot, self._context.device.copies.after_current())
        parts = [(self._total_of(g), parcel.gradients[g], f, g not in self._adding) for g, (_, f) in new.items()]
        self._last_sum = parcel.down
        ticket = self._worker.submit(lambda: self._add(parcel, parts), urgency=_NOW, after=parcel.down)
        for group, tensor in above.items():
            self._adding[group] = ticket
            group.gradients.lodge(self._totals[group], ticket.wait)
            self._leaving.append((parcel.down if parcel.slot is not None else ticket, tensor))

    def _total_of(self, group: Group) -> Tensor:
        if group not in self._totals:
            self._totals[group] = torch.empty(group.own[1] - group.own[0], dtype=torch.float32)
            size = self._totals[group].numel() * 4
            self._context.account.add(State.GRADIENTS, group.unit, Tier.HOST, size)
        return self._totals[group]

    def _add(self, parcel: Parcel, parts: list[tuple[Tensor, Tensor, float, bool]]) -> None:
        try:
            for total, gradient, factor, fresh in parts:
                native.add(total, gradient, factor, self.kernel.threads, fresh=fresh)
        finally:
            if parcel.slot is not None:
                self._inbox.give(parcel.slot, Mark())

    def adds_up(self, group: Group) -> bool:
        """Whether its gradients of this boundary are added up here."""
        return group in self._adding

    def norm_later(self, gradient: Tensor) -> Callable[[], float]:
        """Have the norm of gradients computed once they are added up; returns what waits for it."""
        found: list[float] = []
        ticket = self._worker.submit(
            lambda: found.append(native.sum_of_squares(gradient, self.kernel.threads) ** 0.5),
            urgency=_NOW,
            after=self._last_sum,
        )

        def norm() -> float:
            ticket.wait()
            return found[0]

        return norm

    def forget_gradients(self) -> None:
        """The next micro-step begins new sums."""
        self._adding.clear()
        self._let_go(0)
        for parcel in self._parcels.values():
            if parcel.is_above:
                self._free_above(parcel.gradients)
        self._parcels.clear()
        self.caution.end_step()

    # --------------------------------------------------------------------------------------------------- updates

    def start(
        self,
        unit: Unit,
        shards: list[Shard],
        options: list[dict[str, Any]],
        factor: Factor,
        assumed: float | None = None,
    ) -> None:
        """Queue a unit's update; `options` are those of each parameter group.

        With `assumed` it is done with that factor in other memory, until it is known whether `factor` is another.
        """
        ready = [s for s in shards if is_stepped_on_host(s.group) and s.label >= 0 and s.gradient is not None]
        for shard in ready:
            if shard.tensor not in self._states:
                self._states[shard.tensor] = self._born(shard, options[shard.label])
        if self.store is not None:
            self.store.take_in(unit)
        found = {shard.group: shard.group.gradients.result for shard in ready}
        parcel = self._parcels.pop(unit.index, None) or Parcel({g: r for g, r in found.items() if r is not None})
        job = Job(
            unit,
            ready,
            [options[shard.label] for shard in ready],
            parcel,
            [self._adding[shard.group] for shard in ready if shard.group in self._adding],
            self._context.device.now(),
            assumed,
        )
        for group, result in found.items():
            if result is not None:
                parcel.gradients.setdefault(group, result)  # what is added up here came in no parcel
        self._jobs[unit.index] = job
        if assumed is None and not job.added:
            after = factor.known
        else:
            after = self._last_sum if job.added else parcel.down
        job.tickets.append(Ticket())
        if self.store is not None and self._reader is not None and self.store.seats(unit):
            unit.let_go()  # or the reader would wait for what was expected
            self._reader.submit(lambda: self._fetch(job, factor, after), urgency=unit.index)
        else:
            self._pass_on(job, factor, after)

    def _born(self, shard: Shard, options: dict[str, Any]) -> dict[str, Any]:
        """The state before the first step."""
        if shard.group.chest is None:
            return self.kernel.born(shard.tensor, options)
        return blank(self.kernel.born(torch.empty(1, dtype=shard.tensor.dtype), options), shard)

    def _fetch(self, job: Job, factor: Factor, after: Mark) -> None:
        """The reader's work: bring masters and state from the disk."""
        assert self.store is not None
        try:
            job.seat = self.store.seat(job.unit, job.shards)
        except BaseException as error:
            if job.parcel.is_above:
                self._free_above({g: one for g, one in job.parcel.gradients.items() if one.is_cuda})
            job.tickets[0].fail(error)
            return
        self._pass_on(job, factor, after)

    def _pass_on(self, job: Job, factor: Factor, after: Mark) -> None:
        """To the worker, or to the porter first."""
        if job.parcel.is_above:
            self._porter.submit(lambda: self._load(job, factor), urgency=job.unit.index, after=after)
        else:
            self._submit(job, factor, after)

    def _submit(self, job: Job, factor: Factor, after: Mark) -> None:
        work = partial(self._work, job, factor)
        ready: Passing = after if job.seat is None else All([*job.seat.reads, after])
        self._worker.submit(work, urgency=job.unit.index, after=ready, ticket=job.tickets[0])

    def _load(self, job: Job, factor: Factor) -> None:
        """The porter's work: bring gradients down that are still on the device, as soon as there is a slot for them."""
        parcel = job.parcel
        above = {group: gradient for group, gradient in parcel.gradients.items() if gradient.is_cuda}
        try:
            parcel.slot = self._slots.take(sum(_sizes(above)))
            self._send_down(parcel, above, parcel.slot, self._context.device.copies.after(Mark()))
            parcel.down.synchronize()
        except BaseException as error:
            self._ahead.release()
            self._clear_seat(job, changed=False)
            job.tickets[0].fail(error)
            return
        finally:
            parcel.is_above = False
            self._free_above(above)
        self._submit(job, factor, parcel.down)

    def _clear_seat(self, job: Job, *, changed: bool) -> None:
        seat, job.seat = job.seat, None
        if seat is not None and self.store is not None:
            self.store.clear(seat, changed=changed)

    def _work(self, job: Job, factor: Factor) -> None:
        is_stepped = False
        try:
            if job.parcel.slot is not None:
                self._ahead.release()
            job.parcel.down.synchronize()
            for ticket in job.added:
                ticket.wait()
            if job.seat is not None:
                job.seat.wait()
            if job.final is not None and job.final.known.has_passed:
                job.assumed, job.is_settled, factor = None, True, job.final  # too late to speculate
            if job.assumed is not None:
                job.shadow = self._shadow_of(job)
                self._step(job, job.assumed)
            elif (known := factor()) is not None:
                self._step(job, known)
                self._advance(job)
                is_stepped = True
        finally:
            if job.parcel.slot is not None:
                self._slots.give(job.parcel.slot, job.up)
            self._clear_seat(job, changed=is_stepped)

    def _free_above(self, gradients: dict[Group, Tensor]) -> None:
        """Free gradients on the device that were copied, or that nobody will copy."""
        for memory in gradients.values():
            self._context.scratch.give(memory)
        self._above.remove(sum(_sizes(gradients)))

    @torch.no_grad()
    def _step(self, job: Job, factor: float) -> None:
        outs, slot = self._outs(job)
        for shard, options, out in zip(job.shards, job.options, outs, strict=True):
            new = job.shadow.spares[shard] if job.shadow is not None else None
            target, gradient = Target(options, factor, out, new), job.gradient(shard)
            for span in _chunks(shard.tensor.numel()):
                self.kernel.step(_master(shard), gradient, self._states[shard.tensor], target, span)
                job.up = shard.group.send_up(out[span], shard.start + span.start, job.after)  # one lane: in order
                if slot is None:  # who is let in may need one
                    self._worker.let_in(job.unit.index)
        if slot is not None:
            self._outbox.give(slot, job.up)

    def _outs(self, job: Job) -> tuple[list[Tensor], Tensor | None]:
        """Where each shard's updated parameters are written, 1D in the compute dtype; and the slot that they are in.

        In host memory that is where they rest. Otherwise it is the memory that their gradients came in, unless those
        are still needed or of another size.
        """
        dtypes = [shard.group.precision.compute for shard in job.shards]
        if not any(shard.group.resting.is_cuda for shard in job.shards):
            return [shard.group.resting[shard.start :][: shard.tensor.numel()] for shard in job.shards], None
        gradients = [job.gradient(shard) for shard in job.shards]
        same_size = all(g.dtype.itemsize == dtype.itemsize for g, dtype in zip(gradients, dtypes, strict=True))
        if job.assumed is None and same_size and not job.added:
            return [gradient.view(dtype) for gradient, dtype in zip(gradients, dtypes, strict=True)], None
        numels = [shard.tensor.numel() for shard in job.shards]
        sizes = [_aligned(numel * dtype.itemsize) for numel, dtype in zip(numels, dtypes, strict=True)]
        slot = self._outbox.take(sum(sizes))
        parts = slot[: sum(sizes)].split(sizes)
        return [part.view(d)[:n] for part, d, n in zip(parts, dtypes, numels, strict=True)], slot

    def _advance(self, job: Job) -> None:
        for shard in job.shards:
            self.kernel.advance(self._states[shard.tensor])

    def is_ahead(self, unit: Unit) -> bool:
        """Whether its update was queued before the norm was known."""
        return unit.index in self._jobs

    def arrival(self, unit: Unit) -> Callable[[], None] | None:
        """What has to be waited for before a unit's parameters are used; None if nothing is on its way."""
        job = self._jobs.pop(unit.index, None)
        if job is None:
            return None

        def wait() -> None:
            for ticket in job.tickets:
                ticket.wait()
            job.up.wait()

        return wait

    # --------------------------------------------------------------------------------------------------- shadows

    def may_speculate(self, shards: list[Shard]) -> bool:
        mine = [shard for shard in shards if is_stepped_on_host(shard.group) and shard.label >= 0]
        return self.caution.may_speculate and covers(mine)

    def _shadow_of(self, job: Job) -> Shadow:
        shadow = self.shadows.get(job.unit.index)
        if shadow is None or not shadow.fits(job.shards):
            shadow = Shadow(job.unit, job.shards, self._states, self._context.account)
            self.shadows[job.unit.index] = shadow
        return shadow

    def settle(self, unit: Unit, factor: Factor) -> None:
        """Queue what follows when the norm is known: what was done stands, or is done again."""
        job = self._jobs[unit.index]
        if job.assumed is not None:
            job.final = factor
            job.tickets.append(
                self._worker.submit(lambda: self._resolve(job, factor), urgency=unit.index, after=factor.known)
            )

    @torch.no_grad()
    def _resolve(self, job: Job, factor: Factor) -> None:
        if job.is_settled or not job.tickets[0].has_passed:
            return  # or will be: the update comes later, and knows the factor by then
        job.tickets[0].wait()
        known = factor()
        shadow, job.shadow = job.shadow, None
        assert shadow is not None
        if known == job.assumed:
            shadow.commit(self._states)
            self._advance(job)
            return
        self.caution.note_failure()
        if known is not None:
            self._step(job, known)
            self._advance(job)
        else:
            self._restore(job)

    def _restore(self, job: Job) -> None:
        """Send the old parameters up again."""
        outs, slot = self._outs(job)
        for shard, out in zip(job.shards, outs, strict=True):
            narrow(shard.tensor, out)
            job.up = shard.group.send_up(out, shard.start, job.after)
        if slot is not None:
            self._outbox.give(slot, job.up)


def _gone() -> None:
    raise ShardwellError(
        "these gradients are gone: their unit was updated at once. To read or change gradients before a step, or to "
        'add to them after a backward, set "shardwell": {"commit": "after_norm"}.'
    )


def _master(shard: Shard) -> Tensor | native.Halves:
    """Where it rests: halves are never joined here."""
    if shard.group.halves is None:
        return shard.tensor
    high, low = shard.group.halves
    stretch = slice(shard.start, shard.start + shard.tensor.numel())
    return native.Halves(high[stretch], low[stretch])


def _chunks(numel: int) -> Iterator[slice]:
    for start in range(0, numel, _CHUNK):
        yield slice(start, min(start + _CHUNK, numel))


def _sizes(gradients: dict[Group, Tensor]) -> list[int]:
    return [_aligned(gradient.numel() * gradient.element_size()) for gradient in gradients.values()]


def _param_bytes(group: Group) -> int:
    """Of this rank's part, in the compute dtype."""
    return _aligned((group.own[1] - group.own[0]) * group.precision.compute.itemsize)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
