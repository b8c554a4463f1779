"""Updates on the host: optimizer state rests in host memory, gradients come down, 16-bit parameters go up.

    device      | backward 3 | backward 2 | backward 1 | forward 1 | forward 2 | ...
    down             | grads 3 | grads 2 | grads 1 |
    worker               | update 3 | update 2 | update 1 |
    up                           | params 3 | params 2 | params 1 |

A worker does the updates one after the other. The training loop waits for a unit's update only when it needs the unit's
parameters. When an update may run is its row's commit policy:

- *at once*: as soon as the gradients are down; their pinned memory is one of a few slots
- *after the norm*: when the norm of all gradients is known, under the next forward; gradients are kept until then
- *shadow*: at once, but in other memory; when the norm shows that nothing was clipped and everything is finite, that
  memory becomes the truth, otherwise the unit is stepped again, if it may be, from its untouched old state

All three step a unit by the same arithmetic, from the same state, with the same factor: they give the same bits.

With accumulation the worker also adds up the gradients of the micro-steps, in host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell import native
from shardwell.errors import ShardwellError
from shardwell.memory import Mark, State, Tier
from shardwell.memory.mail import Pinned, Slots
from shardwell.memory.worker import Ticket, Worker
from shardwell.optim.kernels import Kernel, Target
from shardwell.optim.shards import Shard
from shardwell.optim.speculation import Caution, Shadow, covers
from shardwell.rounding import narrow
from shardwell.unit import Context, Group, Unit
from shardwell.unit.table import ReduceAt

Factor = Callable[[], float | None]  # waits for what gradients are multiplied by; None: the step is not applied

_ALIGNMENT = 64  # bytes
_CHUNK = 1 << 23  # elements that are updated and then sent up, while the next ones are updated
_NUM_LEAVING = 1  # gradients that are being copied while the next unit's are made
_NUM_OUT = 2  # slots for parameters on their way up, where those of their gradients do not serve


def rests_on_host(group: Group) -> bool:
    return group.trainable and group.row.optimizer.tier is Tier.HOST


@dataclass
class Parcel:
    """A unit's gradients on their way down."""

    down: Mark
    memory: Tensor | None = None  # pinned; None where they need not move
    is_slot: bool = False


@dataclass
class Job:
    """One unit's update at one boundary."""

    unit: Unit
    shards: list[Shard]
    gradients: list[Tensor]  # of each shard: 1D, in host memory when the parcel is down
    options: list[dict[str, Any]]  # of each shard: the hyperparameters of this step
    parcel: Parcel
    added: list[Ticket]  # what the gradients are the sum of
    after: Mark  # what the device was given before: it still reads the old parameters
    assumed: float | None = None  # the factor of an update that was done before the norm was known
    shadow: Shadow | None = None  # where that went
    up: Mark = field(default_factory=Mark)  # passed when the parameters are on the device
    ticket: Ticket | None = None  # of what was queued last


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
    ) -> None:
        self._context, self._inner, self.kernel = context, inner, kernel
        self._worker = worker
        self._jobs: dict[int, Job] = {}  # of this boundary, by unit
        self._parcels: dict[int, Parcel] = {}  # by unit: gradients that no job has yet
        self._leaving: deque[tuple[Mark | Ticket, Tensor]] = deque()  # device memory that is still read
        self._pinned = Pinned(context.device, context.account)
        largest = max(sum(_param_bytes(group) for group in unit.trainable if rests_on_host(group)) for unit in units)
        self._inbox = Slots(self._pinned, num_slots, largest)
        self._outbox = Slots(self._pinned, _NUM_OUT, largest)
        self._kept: dict[int, Tensor] = {}  # by unit: pinned memory for gradients that wait
        self._totals: dict[Group, Tensor] = {}  # gradients of several micro-steps, added up
        self._adding: dict[Group, Ticket] = {}  # of this boundary: the last that was added
        self.shadows: dict[int, Shadow] = {}  # by unit
        self.caution = Caution()
        for unit in units:
            self.enter(unit)

    def enter(self, unit: Unit) -> None:
        """Take in a unit."""
        for group in unit.trainable:
            group.gradients.hands_over = rests_on_host(group) and group.row.reduce_at is ReduceAt.MICRO_STEP

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
        """Start moving a unit's averaged gradients to the host; `waits`: it is not stepped before the norm is known."""
        self._let_go(_NUM_LEAVING)
        groups = [g for g in unit.trainable if rests_on_host(g) and g.gradients.result is not None]
        moved = {group: group.gradients.result for group in groups if group not in self._adding}
        self._parcels[unit.index], copies = self._send_down(unit, moved, waits=waits)
        down = self._parcels[unit.index].down
        for group, copy in copies.items():
            before = group.gradients.lodge(copy, down.synchronize if waits else _gone)
            if before is not None:
                self._leaving.append((down, before))

    def _send_down(
        self, unit: Unit, moved: dict[Group, Tensor | None], *, waits: bool
    ) -> tuple[Parcel, dict[Group, Tensor]]:
        """Start copying gradients to pinned memory; on the CPU they are where they belong."""
        device = self._context.device
        tensors = {group: tensor for group, tensor in moved.items() if tensor is not None and tensor.is_cuda}
        if not tensors:
            return Parcel(Mark()), {}
        sizes = [_aligned(tensor.numel() * tensor.element_size()) for tensor in tensors.values()]
        memory = self._keep(unit, sum(sizes)) if waits else self._inbox.take(sum(sizes))
        with device.copies.after_current():
            parts = memory[: sum(sizes)].split(sizes)
            copies = {group: group.send_down(tensors[group], part) for group, part in zip(tensors, parts, strict=True)}
        return Parcel(device.copies.mark(), memory, is_slot=not waits), copies

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

    def add_up(self, unit: Unit) -> bool:
        """Add what a micro-step gave to the sums on the host; false if nothing came that belongs there."""
        self._let_go(_NUM_LEAVING)
        handed = {group: group.gradients.hand_over() for group in unit.trainable}
        new = {group: one for group, one in handed.items() if one is not None}
        if not new:
            return False
        parcel, copies = self._send_down(unit, {group: tensor for group, (tensor, _) in new.items()}, waits=False)
        parts = [(self._total_of(g), copies.get(g, t), f, g not in self._adding) for g, (t, f) in new.items()]
        ticket = self._worker.submit(lambda: self._add(parcel, parts))
        for group, (tensor, _) in new.items():
            self._adding[group] = ticket
            group.gradients.lodge(self._totals[group], ticket.wait)
            self._leaving.append((parcel.down if group in copies else ticket, tensor))
        return True

    def _total_of(self, group: Group) -> Tensor:
        if group not in self._totals:
            self._totals[group] = torch.empty(group.own[1] - group.own[0], dtype=torch.float32)
            size = self._totals[group].numel() * 4
            self._context.account.add(State.GRADIENTS, group.unit, Tier.HOST, size)
        return self._totals[group]

    def _add(self, parcel: Parcel, parts: list[tuple[Tensor, Tensor, float, bool]]) -> None:
        try:
            parcel.down.synchronize()
            for total, gradient, factor, fresh in parts:
                native.add(total, gradient, factor, self.kernel.threads, fresh=fresh)
        finally:
            self._give_back(parcel, Mark())

    def _give_back(self, parcel: Parcel, after: Mark) -> None:
        if parcel.is_slot and parcel.memory is not None:
            self._inbox.give(parcel.memory, after)

    def adds_up(self, group: Group) -> bool:
        """Whether its gradients of this boundary are added up here."""
        return group in self._adding

    def norm_later(self, gradient: Tensor) -> Callable[[], float]:
        """Have the norm of gradients computed once they are added up; returns what waits for it."""
        found: list[float] = []
        ticket = self._worker.submit(lambda: found.append(native.sum_of_squares(gradient, self.kernel.threads) ** 0.5))

        def norm() -> float:
            ticket.wait()
            return found[0]

        return norm

    def forget_gradients(self) -> None:
        """The next micro-step begins new sums."""
        self._adding.clear()
        self._let_go(0)
        for parcel in self._parcels.values():
            self._give_back(parcel, parcel.down)
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
        mine = [(shard, shard.gradient) for shard in shards if rests_on_host(shard.group) and shard.label >= 0]
        ready = [(shard, gradient) for shard, gradient in mine if gradient is not None]
        for shard, _ in ready:
            if shard.tensor not in self._states:
                self._states[shard.tensor] = self.kernel.born(shard.tensor, options[shard.label])
        job = Job(
            unit,
            [shard for shard, _ in ready],
            [gradient for _, gradient in ready],
            [options[shard.label] for shard, _ in ready],
            self._parcels.pop(unit.index, Parcel(Mark())),
            [self._adding[shard.group] for shard, _ in ready if shard.group in self._adding],
            self._context.device.now(),
            assumed,
        )
        self._jobs[unit.index] = job
        job.ticket = self._worker.submit(lambda: self._work(job, factor))

    def _work(self, job: Job, factor: Factor) -> None:
        try:
            job.parcel.down.synchronize()
            for ticket in job.added:
                ticket.wait()
            if job.assumed is not None:
                job.shadow = self._shadow_of(job)
                self._step(job, job.assumed)
            elif (known := factor()) is not None:
                self._step(job, known)
                self._advance(job)
        finally:
            self._give_back(job.parcel, job.up)

    @torch.no_grad()
    def _step(self, job: Job, factor: float) -> None:
        outs, slot = self._outs(job)
        for shard, gradient, options, out in zip(job.shards, job.gradients, job.options, outs, strict=True):
            new = job.shadow.spares[shard] if job.shadow is not None else None
            target = Target(options, factor, out, new)
            for span in _chunks(shard.tensor.numel()):
                self.kernel.step(shard.tensor, gradient, self._states[shard.tensor], target, span)
                job.up = shard.group.send_up(out[span], shard.start + span.start, job.after)  # one lane: in order
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
        same_size = all(g.dtype.itemsize == dtype.itemsize for g, dtype in zip(job.gradients, dtypes, strict=True))
        if job.assumed is None and job.parcel.memory is not None and same_size and not job.added:
            return [gradient.view(dtype) for gradient, dtype in zip(job.gradients, dtypes, strict=True)], None
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
            assert job.ticket is not None
            job.ticket.wait()
            job.up.wait()

        return wait

    # --------------------------------------------------------------------------------------------------- shadows

    def may_speculate(self, shards: list[Shard]) -> bool:
        mine = [shard for shard in shards if rests_on_host(shard.group) and shard.label >= 0]
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
            job.ticket = self._worker.submit(lambda: self._resolve(job, factor))

    @torch.no_grad()
    def _resolve(self, job: Job, factor: Factor) -> None:
        known = factor()
        shadow, job.shadow = job.shadow, None
        assert shadow is not None
        if known == job.assumed:
            shadow.commit()
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


def _chunks(numel: int) -> Iterator[slice]:
    for start in range(0, numel, _CHUNK):
        yield slice(start, min(start + _CHUNK, numel))


def _param_bytes(group: Group) -> int:
    """Of this rank's part, in the compute dtype."""
    return _aligned((group.own[1] - group.own[0]) * group.precision.compute.itemsize)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
