"""Updates on the host: optimizer state rests in host memory, gradients come down, 16-bit parameters go up.

    device      | backward 3 | backward 2 | backward 1 | forward 1 | forward 2 | ...
    down             | grads 3 | grads 2 | grads 1 |
    worker               | update 3 | update 2 | update 1 |
    up                           | params 3 | params 2 | params 1 |

A worker does the updates one after the other. The training loop waits for a unit's update only when it needs the unit's
parameters. When an update may run is its row's commit policy:

- *at once*: as soon as the gradients are down
- *after the norm*: when the norm of all gradients is known, under the next forward
- *shadow*: at once, but what it overwrites is kept; when the norm shows that something was clipped or not finite, the
  unit goes back to its untouched old state, and is stepped again if it may be

All three step a unit by the same arithmetic, from the same state, with the same factor: they give the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwell.memory import Mark, State, Tier
from shardwell.memory.worker import Ticket, Worker
from shardwell.optim.kernels import Kernel
from shardwell.optim.shards import Shard
from shardwell.rounding import narrow
from shardwell.unit import Context, Group, Unit

Factor = Callable[[], float | None]  # waits for what gradients are multiplied by; None: the step is not applied


def rests_on_host(group: Group) -> bool:
    return group.trainable and group.row.optimizer.tier is Tier.HOST


@dataclass
class Job:
    """One unit's update at one boundary."""

    unit: Unit
    shards: list[Shard]
    gradients: list[Tensor]  # of each shard: 1D, in host memory when `down` has passed
    options: list[dict[str, Any]]  # of each shard: the hyperparameters of this step
    down: list[Mark]
    after: Mark  # what the device was given before: it still reads the old parameters
    assumed: float | None = None  # the factor of an update that was done before the norm was known
    up: Mark = field(default_factory=Mark)  # passed when the parameters are on the device
    ticket: Ticket | None = None  # of what was queued last
    shadow: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (what was overwritten, as it was)


class HostUpdates:
    """The worker, and what is on its way."""

    def __init__(self, context: Context, states: dict[Tensor, Any], kernel: Kernel) -> None:
        self._context, self._states, self._kernel = context, states, kernel
        self._worker = Worker("shardwell host updates")
        self._jobs: dict[int, Job] = {}  # of this boundary, by unit
        self._down: dict[int, list[Mark]] = {}  # by unit: gradients on their way down
        self._leaving: deque[tuple[Mark, Tensor]] = deque()  # device memory that is being copied from
        self._shadows: dict[int, list[Tensor]] = {}  # by unit: memory for what a shadow keeps

    def bring_down(self, unit: Unit) -> None:
        """Start moving a unit's averaged gradients to the host."""
        while self._leaving and self._leaving[0][0].has_passed:
            self._context.scratch.give(self._leaving.popleft()[1])
        moved = [group.bring_gradients_down() for group in unit.trainable if rests_on_host(group)]
        self._down[unit.index] = [mark for mark, _ in moved]
        self._leaving += [(mark, memory) for mark, memory in moved if memory is not None]

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

        With `assumed` it is done with that factor and can be taken back when `factor` turns out to be another.
        """
        mine = [(shard, shard.gradient) for shard in shards if rests_on_host(shard.group) and shard.label >= 0]
        ready = [(shard, gradient) for shard, gradient in mine if gradient is not None]
        for shard, _ in ready:
            if shard.tensor not in self._states:
                self._states[shard.tensor] = self._kernel.birth(shard.tensor, options[shard.label])
        job = Job(
            unit,
            [shard for shard, _ in ready],
            [gradient for _, gradient in ready],
            [options[shard.label] for shard, _ in ready],
            self._down.pop(unit.index, []),
            self._context.device.now(),
            assumed,
        )
        self._jobs[unit.index] = job
        job.ticket = self._worker.submit(lambda: self._work(job, factor))

    def _work(self, job: Job, factor: Factor) -> None:
        for mark in job.down:
            mark.synchronize()
        if job.assumed is not None:
            self._keep(job)
        known = factor() if job.assumed is None else job.assumed
        if known is not None:
            self._step(job, known)

    @torch.no_grad()
    def _step(self, job: Job, factor: float) -> None:
        for shard, gradient, options in zip(job.shards, job.gradients, job.options, strict=True):
            out = self._out(job, shard)
            self._kernel.step(shard.tensor, gradient, self._states[shard.tensor], options, factor, out)
            job.up = shard.group.send_up(out, shard.start, job.after)  # all follow one another on one lane

    @staticmethod
    def _out(job: Job, shard: Shard) -> Tensor:
        return shard.group.mailbox(shard.start, shard.tensor.numel(), apart=job.assumed is not None)

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

    def settle(self, unit: Unit, factor: Factor) -> None:
        """Queue what follows when the norm is known: what was done stands, or is taken back and done again."""
        job = self._jobs[unit.index]
        if job.assumed is not None:
            job.ticket = self._worker.submit(lambda: self._resolve(job, factor))

    def _keep(self, job: Job) -> None:
        live = [tensor for shard in job.shards for tensor in self._overwritten(shard)]
        kept = self._shadows.get(job.unit.index)
        if kept is None:
            kept = self._shadows[job.unit.index] = [torch.empty_like(tensor) for tensor in live]
            size = sum(copy.numel() * copy.element_size() for copy in kept)
            self._context.account.add(State.STAGING, job.unit.name, Tier.HOST, size)
        for tensor, copy in zip(live, kept, strict=True):
            copy.copy_(tensor)
        job.shadow = list(zip(live, kept, strict=True))

    def _overwritten(self, shard: Shard) -> list[Tensor]:
        return [shard.tensor, *(value for value in self._states[shard.tensor].values() if isinstance(value, Tensor))]

    @torch.no_grad()
    def _resolve(self, job: Job, factor: Factor) -> None:
        known = factor()
        if known == job.assumed:
            return
        for tensor, copy in job.shadow:
            tensor.copy_(copy)
        if known is not None:
            self._step(job, known)
            return
        for shard in job.shards:
            out = self._out(job, shard)
            narrow(shard.tensor, out)
            job.up = shard.group.send_up(out, shard.start, job.after)
