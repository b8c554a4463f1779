"""Gradients that wait on disk, for their norm or for the gradients of further micro-steps.

    device   | backward 3 | backward 2 | backward 1 |               | forward 1 | ...
    slots         | copy 3       | copy 2       | copy 1       |
    disk                         | write 3      | write 2      | ... | read 1 with its state, for the update | ...

The gradients of each unit are swapped tensors. They are copied from the device into one of a few slots and written from
there; sums of micro-steps are read into a slot first. An update reads them into the update buffer of the unit. If the
user reads them, or adds to them on the device, they are brought back to ordinary memory and stay there until the next
step has its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.memory import Event, StateKind, Tier
from shardwell.memory.timing import AllOf, Waitable
from shardwell.offload.disk import DiskTier, DiskTransfer
from shardwell.offload.staging import AlignedAllocator, StagingPool
from shardwell.offload.swapped_tensors import SwappedTensors
from shardwell.offload.worker import TaskHandle, Worker
from shardwell.sharding import EngineContext, ShardedGroup, Unit

NUM_SLOTS = 3  # one that gradients are copied into, two that are written or read


@dataclass
class SwappedGradients:
    """The gradients of one unit."""

    swapped: SwappedTensors
    tensors: dict[ShardedGroup, Tensor] = field(default_factory=dict)  # 1D
    written: TaskHandle | None = None  # the task that swapped them out last
    num_bytes: int = 0  # on disk

    def ready(self) -> SwappedTensors:
        """Wait until they are being written and are not in use; raise the error of the swap."""
        if self.written is not None:
            self.written.wait()
        return self.swapped


@dataclass(frozen=True)
class _InSlot:
    """Gradients that are in a slot now."""

    swapped: SwappedGradients
    slot: Tensor
    after: Waitable  # passed when they are complete
    added: TaskHandle | None = None  # the task that completes them, if it may fail


class GradientSwapper:
    """The gradients of an engine's units that wait on disk. Only the training loop calls it."""

    def __init__(self, tier: DiskTier, context: EngineContext, worker: Worker, urgency: int) -> None:
        self._tier, self._context, self._worker, self._urgency = tier, context, worker, urgency
        pinned = AlignedAllocator(context.device, context.memory_stats, pinned=context.device.has_device_memory)
        self._slots = StagingPool(pinned, NUM_SLOTS, 0)
        self._units: dict[str, SwappedGradients] = {}
        self._in_slot: _InSlot | None = None

    @staticmethod
    def has(unit: Unit) -> bool:
        """Return whether the gradients of a unit are stored on disk while they wait."""
        return any(group.is_stepped_on_host and group.spec.gradients.tier is Tier.DISK for group in unit.trainable)

    def write(
        self, unit: Unit, gradients: dict[ShardedGroup, Tensor], copy: Callable[[dict[ShardedGroup, Tensor]], Event]
    ) -> None:
        """Store new gradients. `copy` starts the copy into tensors and returns the event of its end."""
        swapped, _, slot = self._swap_in(
            unit, {group: gradient.dtype for group, gradient in gradients.items()}, blank=True
        )
        self._in_slot = _InSlot(swapped, slot, copy(swapped.tensors))
        self.swap_out()

    def add(
        self, unit: Unit, groups: Iterable[ShardedGroup], *, after: Waitable, fresh: bool
    ) -> tuple[dict[ShardedGroup, Tensor], list[DiskTransfer]]:
        """Return the sums of a unit's gradients and the reads that bring them into memory, until `swap_out` is called.

        They are complete when the worker has done what it is given until then, and `after` has passed. With `fresh`
        there are no sums yet.
        """
        before = {} if fresh else self._tensors_of(unit)
        swapped, reads, slot = self._swap_in(unit, dict.fromkeys((*before, *groups), torch.float32), blank=fresh)
        self._in_slot = _InSlot(swapped, slot, AllOf([after, *reads]))
        return swapped.tensors, reads

    def completed_by(self, added: TaskHandle) -> None:
        """Write what is in memory only if this task of the worker succeeds."""
        assert self._in_slot is not None
        self._in_slot = replace(self._in_slot, added=added)

    def swap_out(self) -> None:
        """Write what is in memory, after the tasks of the worker that use it."""
        in_slot, self._in_slot = self._in_slot, None
        if in_slot is None:
            return
        swapped, slot, added = in_slot.swapped.swapped, in_slot.slot, in_slot.added

        def put_back() -> None:
            writes: list[DiskTransfer] = []
            try:
                writes = swapped.swap_out(changed=added is None or added.has_succeeded)
                if added is not None:
                    added.wait()
            finally:
                self._slots.give(slot, AllOf([in_slot.after, *writes]))

        in_slot.swapped.written = self._worker.submit(put_back, urgency=self._urgency, after=in_slot.after)

    def of(self, unit: Unit) -> SwappedGradients | None:
        """Return the gradients that an update has to read; None if there are none."""
        self.swap_out()
        swapped = self._units.get(unit.name)
        return swapped if swapped is not None and swapped.num_bytes else None

    def restore(self, name: str) -> None:
        """Bring a unit's gradients back to ordinary memory."""
        self.swap_out()
        swapped = self._units[name]
        if swapped.num_bytes:
            swapped.ready().restore()
            self._note(name, swapped, 0)

    def leave(self, name: str) -> None:
        """Forget a unit."""
        self.swap_out()
        swapped = self._units.pop(name, None)
        if swapped is not None:
            with contextlib.suppress(ShardwellError):
                swapped.ready()
            swapped.swapped.free()
            self._note(name, swapped, 0)

    def _tensors_of(self, unit: Unit) -> dict[ShardedGroup, Tensor]:
        return self._units[unit.name].tensors if unit.name in self._units else {}

    def _swap_in(
        self, unit: Unit, wanted: dict[ShardedGroup, torch.dtype], *, blank: bool
    ) -> tuple[SwappedGradients, list[DiskTransfer], Tensor]:
        """Start to bring a unit's tensors into a slot; with `blank` they are not read."""
        self.swap_out()
        swapped = self._units.get(unit.name)
        if swapped is None:
            swapped = self._units[unit.name] = SwappedGradients(
                SwappedTensors(self._tier, self._context.memory_stats, unit.name)
            )
        if not blank:
            swapped.ready()
        swapped.tensors = {group: _tensor(swapped.tensors.get(group), group, dtype) for group, dtype in wanted.items()}
        swapped.swapped.register(list(swapped.tensors.values()))
        self._note(unit.name, swapped, sum(tensor.nbytes for tensor in swapped.tensors.values()))
        slot = self._slots.take(swapped.swapped.num_bytes)
        try:
            return swapped, swapped.swapped.swap_in_to(slot, blank=blank), slot
        except BaseException:
            self._slots.give(slot, Event())
            raise

    def _note(self, name: str, swapped: SwappedGradients, num_bytes: int) -> None:
        swapped.num_bytes = num_bytes
        self._context.memory_stats.set(StateKind.GRADIENTS, name, Tier.DISK, num_bytes)


def _tensor(before: Tensor | None, group: ShardedGroup, dtype: torch.dtype) -> Tensor:
    """Return the same tensor as before if it fits, or one that has no memory yet."""
    numel = group.local_numel
    if before is not None and before.dtype is dtype and before.numel() == numel:
        return before
    return torch.zeros(1, dtype=dtype, device=group.context.device.host).expand(numel)
