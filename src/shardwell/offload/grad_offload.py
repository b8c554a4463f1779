"""Gradients that are copied to the host: to where they wait, through slots, or into sums over micro-steps.

Gradients of units that are updated immediately stay on the device until the copy thread has one of a few pinned slots
for them.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shardwell import kernels
from shardwell.memory import Event, StateKind, Tier
from shardwell.memory.timing import AllOf, Waitable
from shardwell.memory.virtual_streams import gate
from shardwell.offload.disk import DiskTransfer
from shardwell.offload.grad_swap import GradientSwapper, SwappedGradients
from shardwell.offload.staging import PinnedAllocator, StagingPool, throttle
from shardwell.offload.worker import TaskHandle, Worker
from shardwell.sharding import EngineContext, ShardedGroup, Unit
from shardwell.sharding.spec import ReduceAt

_NOW = -1  # more urgent than any unit
_ALIGNMENT = 64  # bytes
_NUM_LEAVING = 1  # gradients that may still be copied while the next unit's are computed
WAITING_SHARE = 1 / 32  # share of device memory for gradients that wait there for the host


@dataclass
class GradientTransfer:
    """A unit's gradients in flight to the host."""

    gradients: dict[ShardedGroup, Tensor]  # 1D: where the gradients are now
    down: Event = field(default_factory=Event)  # passed when the gradients are in host memory
    slot: Tensor | None = None  # staging memory that the gradients are in
    is_on_device: bool = False  # the gradients are still on the device
    swapped: SwappedGradients | None = None  # the gradients are on disk, or in flight to it


class GradientOffloader:
    """Copies the gradients of units that are stepped on the host."""

    def __init__(self, context: EngineContext, units: list[Unit], worker: Worker, threads: int, num_slots: int) -> None:
        self._context, self._worker, self._threads = context, worker, threads
        self._transfers: dict[int, GradientTransfer] = {}  # by unit: gradients that no update has taken yet
        self._leaving: deque[tuple[Event | TaskHandle, Tensor]] = deque()  # device memory that copies still read
        self.pinned = PinnedAllocator(context.device, context.memory_stats)
        self.largest = max(
            sum(_param_bytes(group) for group in unit.trainable if group.is_stepped_on_host) for unit in units
        )
        self._ahead = gate(max(1, num_slots - 2))  # units to copy to the host before they are updated
        self._copier = Worker("shardwell gradient copies", gate=self._ahead, turns=worker.turns)
        self._throttle = throttle(max(2 * self.largest, int(WAITING_SHARE * context.device.capacity_bytes())))
        self._slots = StagingPool(self.pinned, num_slots, self.largest)  # for the copy thread
        self._inbox = StagingPool(self.pinned, num_slots, self.largest)  # for the training loop: gradients to be added
        self._kept: dict[str, Tensor] = {}  # by unit: pinned memory for gradients that wait
        self._totals: dict[ShardedGroup, Tensor] = {}  # sums of gradients over micro-steps
        self._adding: dict[ShardedGroup, TaskHandle] = {}  # of this boundary: the last addition to each sum
        self._last_sum: Waitable = Event()  # passed when all summands and sums are in memory
        self._swapper = None if context.disk is None else GradientSwapper(context.disk, context, worker, _NOW)
        for unit in units:
            self.enter(unit)

    def enter(self, unit: Unit) -> None:
        """Add a unit."""
        for group in unit.trainable:
            group.gradients.reduced.accumulates_elsewhere = (
                group.is_stepped_on_host and group.spec.reduce_at is ReduceAt.MICRO_STEP
            )

    def leave(self, group: ShardedGroup) -> None:
        """Remove a group whose state will be stored elsewhere."""
        group.gradients.reduced.accumulates_elsewhere = False
        if self._swapper is not None:
            self._swapper.leave(group.unit)
        self._free_kept(group.unit)
        total = self._totals.pop(group, None)
        if total is not None:
            self._context.memory_stats.remove(StateKind.GRADIENTS, group.unit, Tier.HOST, total.nbytes)

    def forget(self) -> None:
        """Drop the gradients of this boundary; the next micro-step begins new sums."""
        self._adding.clear()
        self._free_copied(0)
        if self._swapper is not None:
            self._swapper.swap_out()
        for transfer in self._transfers.values():
            self.give_up(transfer)
        self._transfers.clear()

    def offload(self, unit: Unit, *, waits: bool) -> None:
        """Take a unit's averaged gradients. Those of a unit that `waits` for the norm are copied to the host now."""
        self._free_copied(_NUM_LEAVING)
        on_disk = self._waits_on_disk(unit) if waits else None
        is_on_device = self._context.device.is_on_device
        on_device = {
            group: group.gradients.result
            for group in unit.trainable
            if group.is_stepped_on_host and group not in self._adding and group.gradients.result is not None
            if not group.gradients.reduced.is_moved and (on_disk is not None or is_on_device(group.gradients.result))
        }
        if not on_device:
            return
        if not waits:
            self._throttle.add(sum(_sizes(on_device)))
            self._transfers[unit.index] = GradientTransfer(on_device, is_on_device=True)
            for group in on_device:
                group.gradients.reduced.discard()
            self._free_kept(unit.name)  # not needed: its last update has ended, or did not use it
            return
        transfer = self._transfers[unit.index] = GradientTransfer(dict(on_device))
        if on_disk is not None:
            on_disk.write(unit, on_device, partial(self._copy_into, transfer, on_device))
            arrive: Callable[[], None] = partial(on_disk.restore, unit.name)
        else:
            memory = self._keep(unit, sum(_sizes(on_device)))
            self._copy_to_memory(transfer, on_device, memory, self._context.device.copy_stream.after_current())
            arrive = transfer.down.synchronize
        for group, copy in transfer.gradients.items():
            group.gradients.reduced.move(copy, arrive)
            self._leaving.append((transfer.down, on_device[group]))

    def _waits_on_disk(self, unit: Unit) -> GradientSwapper | None:
        """Return the swapper that keeps the unit's gradients, if they wait on disk."""
        return self._swapper if self._swapper is not None and self._swapper.has(unit) else None

    def _copy_into(
        self, transfer: GradientTransfer, on_device: dict[ShardedGroup, Tensor], into: dict[ShardedGroup, Tensor]
    ) -> Event:
        """Start to copy gradients into tensors."""
        with self._context.device.copy_stream.after_current(), torch.no_grad():
            for group, gradient in on_device.items():
                transfer.gradients[group] = into[group]
                _start_copy(gradient, into[group])
        transfer.down = self._context.device.copy_stream.record()
        return transfer.down

    def _copy_to_memory(
        self,
        transfer: GradientTransfer,
        on_device: dict[ShardedGroup, Tensor],
        memory: Tensor,
        stream: contextlib.AbstractContextManager[None],
    ) -> None:
        """Start to copy gradients to pinned memory."""
        sizes = _sizes(on_device)
        with stream, torch.no_grad():
            parts = memory[: sum(sizes)].split(sizes)
            for (group, gradient), part in zip(on_device.items(), parts, strict=True):
                transfer.gradients[group] = _start_copy(gradient, part)
        transfer.down = self._context.device.copy_stream.record()

    def _keep(self, unit: Unit, num_bytes: int) -> Tensor:
        if unit.name in self._kept and self._kept[unit.name].numel() < num_bytes:
            self.pinned.drop(self._kept.pop(unit.name), unit.name)
        if unit.name not in self._kept:
            self._kept[unit.name] = self.pinned.make(num_bytes, unit.name)
        return self._kept[unit.name]

    def _free_kept(self, unit: str) -> None:
        kept = self._kept.pop(unit, None)
        if kept is not None:
            self.pinned.drop(kept, unit)

    def _free_copied(self, but: int) -> None:
        """Free the memory that was copied from, except for the last `but` copies.

        The next user of the memory is ordered behind the copy.
        """
        while len(self._leaving) > but:
            passed, memory = self._leaving[0]
            if isinstance(passed, Event):
                passed.wait()
            elif not passed.has_passed:
                return
            self._context.temporary.free(memory)
            self._leaving.popleft()

    def take(self, unit: Unit, found: dict[ShardedGroup, Tensor]) -> tuple[GradientTransfer, list[TaskHandle]]:
        """Return the gradients for an update, and the additions that some of them are the sum of."""
        transfer = self._transfers.pop(unit.index, None) or GradientTransfer({})
        for group, result in found.items():
            transfer.gradients.setdefault(group, result)  # sums are not in the transfer
        on_disk = self._waits_on_disk(unit)
        transfer.swapped = None if on_disk is None else on_disk.of(unit)
        return transfer, [self._adding[group] for group in found if group in self._adding]

    def down_after(self, transfer: GradientTransfer, added: list[TaskHandle]) -> Waitable:
        """Return what passes when all gradients of a transfer are in host memory."""
        return self._last_sum if added else transfer.down

    def copy_when_slot_free(
        self,
        transfer: GradientTransfer,
        urgency: int,
        after: Waitable,
        then: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Copy gradients that are still on the device to the host, as soon as there is a slot for them.

        Then `then` is called, or `fail` on an error. The code that works on the gradients calls `begin` and `end`.
        """

        def load() -> None:
            on_device, trouble = _on_device(transfer), None
            try:
                transfer.slot = self._slots.take(sum(_sizes(on_device)))
                self._copy_to_memory(
                    transfer, on_device, transfer.slot, self._context.device.copy_stream.after(Event())
                )
                transfer.down.synchronize()
            except BaseException as error:
                trouble = error
            transfer.is_on_device = False
            self._free(on_device)
            if trouble is None:
                then()
            else:
                self._ahead.release()
                self.end(transfer, transfer.down)
                fail(trouble)

        self._copier.submit(load, urgency=urgency, after=after)

    def begin(self, transfer: GradientTransfer) -> None:
        """Note that the worker begins with these gradients: the next ones may be copied to the host."""
        if transfer.slot is not None:
            self._ahead.release()
        transfer.down.synchronize()

    def end(self, transfer: GradientTransfer, after: Event) -> None:
        """Release the memory of gradients, which may be used again after the event."""
        if transfer.slot is not None:
            self._slots.give(transfer.slot, after)

    def give_up(self, transfer: GradientTransfer) -> None:
        """Free gradients that are still on the device and will not be copied."""
        if transfer.is_on_device:
            transfer.is_on_device = False
            self._free(_on_device(transfer))

    def _free(self, gradients: dict[ShardedGroup, Tensor]) -> None:
        for memory in gradients.values():
            self._context.temporary.free(memory)
        self._throttle.remove(sum(_sizes(gradients)))

    # ------------------------------------------------------------------------------------------------------ sums

    def accumulate(self, unit: Unit) -> None:
        """Add the gradients of a micro-step to the sums on the host, for groups that have one."""
        self._free_copied(_NUM_LEAVING)
        mine = [group for group in unit.trainable if group.gradients.reduced.micro_step is not None]
        if not mine:
            return
        new = {group: one for group in mine if (one := group.gradients.reduced.take_micro_step()) is not None}
        on_device = {group: tensor for group, (tensor, _) in new.items()}
        transfer = GradientTransfer(dict(on_device))
        if self._context.device.has_device_memory:
            transfer.slot = self._inbox.take(sum(_sizes(on_device)))
            self._copy_to_memory(transfer, on_device, transfer.slot, self._context.device.copy_stream.after_current())
        on_disk, reads = self._waits_on_disk(unit), list[DiskTransfer]()
        if on_disk is None:
            totals = {group: self._total_of(group) for group in new}
        else:
            is_fresh = not any(group in self._adding for group in unit.trainable)
            totals, reads = on_disk.add(unit, new, after=transfer.down, fresh=is_fresh)
        parts = [
            (totals[group], transfer.gradients[group], f, group not in self._adding) for group, (_, f) in new.items()
        ]
        self._last_sum = AllOf([transfer.down, *reads])
        before = [self._adding[group] for group in new if group in self._adding]
        needs = [*(ticket.wait for ticket in before), *(read.wait for read in reads)]
        ticket = self._worker.submit(lambda: self._add(transfer, parts, needs), urgency=_NOW, after=self._last_sum)
        if on_disk is not None:
            on_disk.completed_by(ticket)
        for group, tensor in on_device.items():
            self._adding[group] = ticket
            group.gradients.reduced.move(
                totals[group], ticket.wait if on_disk is None else _back(ticket, on_disk, unit)
            )
            self._leaving.append((transfer.down if transfer.slot is not None else ticket, tensor))

    def _total_of(self, group: ShardedGroup) -> Tensor:
        if group not in self._totals:
            self._totals[group] = self._context.device.host_empty(group.local_numel, torch.float32)
            size = self._totals[group].numel() * 4
            self._context.memory_stats.add(StateKind.GRADIENTS, group.unit, Tier.HOST, size)
        return self._totals[group]

    def _add(
        self,
        transfer: GradientTransfer,
        parts: list[tuple[Tensor, Tensor, float, bool]],
        needs: Sequence[Callable[[], None]],
    ) -> None:
        """Add gradients to sums. `needs` are called first, and raise if a sum is not valid."""
        try:
            for wait in needs:
                wait()
            for total, gradient, factor, fresh in parts:
                kernels.add(total, gradient, factor, self._threads, fresh=fresh)
        finally:
            if transfer.slot is not None:
                self._inbox.give(transfer.slot, Event())

    def accumulates(self, group: ShardedGroup) -> bool:
        """Return whether the group's gradients of this boundary are summed on the host."""
        return group in self._adding

    def norm_later(self, group: ShardedGroup, gradient: Tensor) -> Callable[[], float]:
        """Queue the norm of gradients, computed once they are summed, and return a function that waits for it."""
        found: list[float] = []
        added = self._adding[group]
        ticket = self._worker.submit(
            lambda: found.append(kernels.sum_of_squares(gradient, self._threads) ** 0.5),
            urgency=_NOW,
            after=self._last_sum,
        )

        def norm() -> float:
            added.wait()
            ticket.wait()
            return found[0]

        return norm


def _back(added: TaskHandle, on_disk: GradientSwapper, unit: Unit) -> Callable[[], None]:
    """Return a function that brings sums back to memory once the last gradients are added."""

    def arrive() -> None:
        added.wait()
        on_disk.restore(unit.name)

    return arrive


def _on_device(transfer: GradientTransfer) -> dict[ShardedGroup, Tensor]:
    return {
        group: gradient for group, gradient in transfer.gradients.items() if group.context.device.is_on_device(gradient)
    }


def _sizes(gradients: dict[ShardedGroup, Tensor]) -> list[int]:
    return [aligned_size(gradient.numel() * gradient.element_size()) for gradient in gradients.values()]


def _param_bytes(group: ShardedGroup) -> int:
    """Return the bytes of this rank's part in the compute dtype."""
    return aligned_size((group.local_numel) * group.precision.compute.itemsize)


def aligned_size(num_bytes: int) -> int:
    """Round a size up to the alignment of staging memory."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _start_copy(gradients: Tensor, memory: Tensor) -> Tensor:
    """Start to copy gradients into pinned memory on the current stream; return the copy: 1D, in their dtype."""
    copy = memory.view(gradients.dtype)[: gradients.numel()]
    return copy.copy_(gradients, non_blocking=True)
