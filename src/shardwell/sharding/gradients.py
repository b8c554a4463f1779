"""A group's gradients: filled by backward, averaged over the ranks, added up over micro-steps.

Autograd hands over one parameter's gradient at a time. It is copied into the group's flat buffer at once, so that
nothing but the flat buffer outlives the hook; a later gradient of the same parameter is added. Reducing empties the
flat buffer into `result`, which holds what the optimizer will read. Reduces are additive: a gradient that arrives
after its group's reduce began opens a new flat buffer and is reduced again. It waits for nothing: gradients arrive in
an order that may differ between ranks, and whatever ends a reduce may begin another collective.

Looking changes nothing: what is not reduced yet is averaged as a copy.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.memory import StateKind, TemporaryBuffers
from shardwell.parallel import Collectives, TrafficKind, Work
from shardwell.sharding.layout import Layout
from shardwell.sharding.residual import QuantizationResidual
from shardwell.sharding.spec import CommitPolicy, GroupPrecision, ShardingSpec


class GradState(enum.Enum):
    NONE = "none"
    PARTIAL = "partial"  # this rank's own sum, in the flat buffer; an earlier one may be on its way
    REDUCING = "reducing"
    REDUCED = "reduced"  # averaged, in `result`

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere


_ALLOWED = {
    GradState.NONE: {GradState.PARTIAL},
    GradState.PARTIAL: {GradState.REDUCING, GradState.NONE},
    GradState.REDUCING: {GradState.REDUCED, GradState.PARTIAL},
    GradState.REDUCED: {GradState.PARTIAL, GradState.NONE},
}


class Gradients:
    """The gradient buffers of one group."""

    result: Tensor | None  # 1D: this rank's shard, or all of it on rows that keep gradients whole

    def __init__(
        self,
        name: str,
        unit: str,
        layout: Layout,
        row: ShardingSpec,
        precision: GroupPrecision,
        comm: Collectives,
        scratch: TemporaryBuffers,
    ) -> None:
        self._name, self._unit = name, unit
        self._layout, self._row, self._precision = layout, row, precision
        self._comm, self._scratch = comm, scratch
        self.state = GradState.NONE
        self.result = None
        self.commit = row.commit  # when what is made of them becomes the truth
        self._lodging: Callable[[], None] | None = None  # waits for a result that lives in memory of somebody else
        self.hands_over = False  # somebody else adds up the gradients of several micro-steps
        self._handed: tuple[Tensor, float] | None = None  # what is to be added, and what it is multiplied by first
        self._flat: Tensor | None = None  # 1D, padded
        self._filled = [False] * len(layout.slots)  # in the flat buffer
        self.seen = [False] * len(layout.slots)  # since the last `clear`
        self._came_last = [False] * len(layout.slots)  # of those: at the boundary
        self._scaled_late = False
        self._expected = 1.0  # what gradients in the flat buffer that are scaled late will be scaled by
        self._scale = 1.0  # what the reduce has to multiply by
        self._pending: Work | None = None  # a reduce
        self._publishing: Work | None = None  # its second half, on rows that keep gradients whole
        self._lost: QuantizationResidual | None = None  # in codes, and not said yet
        self.loss_scale = 1.0  # that the gradients of this step carry

    def move(self, state: GradState) -> None:
        assert state in _ALLOWED[self.state], f"gradients of {self._name} cannot go from {self.state} to {state}"
        self.state = state

    @property
    def is_partial(self) -> bool:
        return self.state is GradState.PARTIAL

    @property
    def is_complete(self) -> bool:
        """Every parameter got a gradient at the boundary; what came in earlier micro-steps does not say so."""
        return all(self._came_last)

    def accumulate(self, index: int, grad: Tensor, scale: float, *, stays: bool, is_last: bool) -> None:
        """Add one parameter's gradient. `stays`: it will wait for later micro-steps, so it is kept in full precision.

        `is_last`: it comes at the boundary.

        Wide gradients are scaled here, for the price of the copy; 16-bit ones where they are summed in fp32, except for
        what is divided off before they travel.
        """
        self.seen[index] = True
        self._came_last[index] = self._came_last[index] or is_last
        if self._flat is None and not self._open(grad, scale, stays):
            return
        assert self._flat is not None
        slot = self._layout.slots[index]
        view = self._flat.as_strided(slot.shape, slot.stride, slot.offset)
        if grad.is_sparse:
            grad = grad.to_dense()
        if self._scaled_late:
            scale = scale / self._expected / self._precision.wire.predivide
        if self._filled[index]:
            view.add_(grad, alpha=scale)
        elif scale == 1.0:
            view.copy_(grad)
        elif grad.dtype.itemsize >= view.dtype.itemsize:  # scaled before it is rounded
            torch.mul(grad, scale, out=view)
        else:
            view.copy_(grad).mul_(scale)
        self._filled[index] = True

    def _open(self, grad: Tensor | None, scale: float, stays: bool) -> bool:
        """Start a flat buffer and decide where it is scaled; false if `grad` itself became the buffer."""
        wire = self._precision.wire
        dtype = self._precision.accumulate if stays else wire.dtype or self._precision.compute
        slots = self._layout.slots
        self.move(GradState.PARTIAL)
        # A group of one parameter without padding: autograd's gradient serves as it is, without a copy.
        alone = len(slots) == 1 and slots[0].numel == self._layout.padded and not stays
        adopt = (
            grad is not None
            and alone
            and wire.predivide == 1.0
            and not grad.is_sparse
            and grad.dtype == dtype
            and grad.stride() == slots[0].stride
        )
        # All ranks must decide alike where to scale, also one that has no gradient.
        self._scaled_late = alone or dtype.itemsize <= 2
        self._expected = scale
        self._scale = scale * wire.predivide if self._scaled_late else 1.0
        self._filled = [adopt] * len(slots)
        if adopt and grad is not None:
            flat = grad.as_strided((grad.numel(),), (1,), grad.storage_offset())
            self._flat = self._scratch.adopt(flat, StateKind.GRADIENTS, self._unit)
        else:
            self._flat = self._scratch.allocate(self._layout.padded, dtype, StateKind.GRADIENTS, self._unit)
        return not adopt

    def reduce_scatter(self, scale: float, *, stays: bool, accumulates: bool, loss_scale: float = 1.0) -> None:
        """Start averaging what is in the flat buffer (nothing counts as zeros) into `result`."""
        self.loss_scale = loss_scale
        self.wait()
        if self.state is not GradState.PARTIAL:
            self._open(None, scale, stays)
        assert self._flat is not None
        self.move(GradState.REDUCING)
        for slot, filled in zip(self._layout.slots, self._filled, strict=True):
            if not filled:
                self._flat[slot.offset : slot.end].zero_()
        if self._row.reduce_codecs is not None:
            self._flat[self._layout.numel :].zero_()  # it shares a block with numbers
        if self._scaled_late and scale != self._expected:  # other ranks may have begun with another micro-step
            self._flat.mul_(self._expected / scale)
            self._scale = scale * self._precision.wire.predivide
        flat = self._for_the_wire(self._flat, scale)
        self._flat = None
        self._pending = (
            self._average_whole(flat) if self._row.gradients.axis is None else self._scatter(flat, accumulates)
        )

    def _for_the_wire(self, flat: Tensor, scale: float) -> Tensor:
        """The flat buffer in the dtype that was asked for; what was scaled already is scaled back as far as needed."""
        wire = self._precision.wire
        if wire.dtype is None or flat.dtype == wire.dtype:
            return flat
        sent = self._scratch.allocate(flat.numel(), wire.dtype, StateKind.GRADIENTS, self._unit)
        if not self._scaled_late:
            self._scale = scale * wire.predivide
            flat.div_(self._scale)
        sent.copy_(flat)
        self._scratch.free(flat)
        return sent

    def _scatter(self, flat: Tensor, accumulates: bool) -> Work:
        if self.hands_over and accumulates:
            return self._scatter_to_hand_over(flat)
        as_it_is = self._scale == 1.0 and not accumulates and flat.dtype == self._result_dtype(flat)
        if self._comm.mesh.size == 1 and self.result is None and as_it_is:
            return Work(partial(self._adopt, flat))
        fresh = self.result is None
        if self.result is None:
            dtype = self._precision.accumulate if accumulates else self._result_dtype(flat)
            self.result = self._take_result(self._layout.shard_numel, dtype)
        elif self.result.dtype.itemsize <= 2 or self._lodging is not None:
            self._widen()
        move = self._reduced(flat, self.result, not fresh)
        return move.then(partial(self._scratch.free, flat))

    def _scatter_to_hand_over(self, flat: Tensor) -> Work:
        if self._comm.mesh.size == 1:
            return Work(partial(self._hand, flat, self._scale))
        fresh = self._take_result(self._layout.shard_numel, self._precision.accumulate)

        def finish() -> None:
            self._hand(fresh, 1.0)
            self._scratch.free(flat)

        return self._reduced(flat, fresh, False).then(finish)

    def _hand(self, fresh: Tensor, factor: float) -> None:
        """This is to be added up elsewhere, with what nobody has fetched yet."""
        if self._handed is not None:
            before, its_factor = self._handed
            both = self._take_result(fresh.numel(), self._precision.accumulate)
            both.copy_(before).mul_(its_factor).add_(fresh, alpha=factor)
            self._scratch.free(before)
            self._scratch.free(fresh)
            fresh, factor = both, 1.0
        self._handed = fresh, factor

    def _reduced(self, flat: Tensor, into: Tensor, accumulate: bool) -> Work:
        token, codecs = f"REDUCE {self._name}", self._row.reduce_codecs
        if codecs is not None and self._row.feedback and self._lost is None:
            self._lost = QuantizationResidual(
                self._comm.residual_numel(flat.numel(), codecs), self._unit, self._scratch
            )
        lost = self._lost.joining(self._scale / self.loss_scale) if self._lost is not None else None
        return self._comm.reduce_scatter(flat, into, self._scale, accumulate, token, codecs, lost=lost)

    def free(self) -> None:
        """Forget everything, also what codes did not say."""
        self.clear()
        if self._lost is not None:
            self._lost.free()
            self._lost = None

    def _result_dtype(self, flat: Tensor) -> torch.dtype:
        """As wide as the gradients are and as they travelled."""
        return torch.promote_types(self._precision.compute, flat.dtype)

    def _average_whole(self, flat: Tensor) -> Work:
        """Reduce into this rank's own slice, then send the slice to everyone."""
        start, end = self._layout.shard_range(self._comm.shard_index)
        reduced = self._comm.reduce_scatter(flat, flat[start:end], self._scale, False, f"REDUCE {self._name}")

        def publish() -> None:
            published = self._comm.all_gather(flat, f"PUBLISH {self._name}", TrafficKind.PUBLISH)
            self._publishing = published.then(partial(self._adopt, flat))

        return reduced.then(publish)

    def start_next_hop(self) -> bool:
        """Begin the second hop of a reduce, where the host has to; false if there is none that has not begun."""
        return self._pending is not None and self._pending.start_next_hop()

    def finish(self) -> None:
        """Wait for the reduce. On rows that keep gradients whole this only starts the second half; `settle` ends it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
            if self.state is GradState.REDUCING:
                self.move(GradState.REDUCED)

    def move_result(self, memory: Tensor, arrive: Callable[[], None]) -> Tensor | None:
        """`result` lives in `memory` (1D) from now on, and is there when `arrive` returns; returns where it lived."""
        before = self.result if self._lodging is None else None
        self.result, self._lodging = memory, arrive
        return before

    @property
    def is_moved(self) -> bool:
        """Whether `result` lives in memory of somebody else."""
        return self._lodging is not None

    def discard_result(self) -> Tensor:
        """Give up the result (1D) for good: whoever asks for it later gets an error. Returns its memory."""
        result = self.result
        assert result is not None
        self.move_result(result.new_empty(0), gone)
        return result

    def ensure_readable(self) -> None:
        """Wait until the host may read a result that lives in memory of somebody else."""
        if self._lodging is not None:
            self._lodging()

    def take_micro_step(self) -> tuple[Tensor, float] | None:
        """What was reduced and is to be added up elsewhere (1D), and its factor; None if there is nothing new."""
        handed, self._handed = self._handed, None
        return handed

    def wait(self) -> None:
        """Wait until `result` may be read."""
        self.finish()
        if self._publishing is not None:
            publishing, self._publishing = self._publishing, None
            publishing.wait()

    # ------------------------------------------------------------------------------------------------------- looking

    @property
    def wide(self) -> torch.dtype:
        """What they are shown in."""
        own = torch.promote_types(self._precision.compute, self._precision.accumulate)
        return torch.promote_types(own, torch.float32)

    @property
    def has_any(self) -> bool:
        """This rank has some of this boundary, averaged or not."""
        return self.state is not GradState.NONE

    @property
    def is_discarded(self) -> bool:
        """They were given up for good."""
        return self._lodging is gone

    @property
    def needs_collective(self) -> bool:
        """Whether who waits for what is on its way begins something that all ranks begin together."""
        hops = self._comm.hops is not None and self._comm.host_drives_progress
        is_whole = self._row.gradients.axis is None and self._comm.mesh.size > 1
        return (self._pending is not None and (is_whole or hops)) or (self._publishing is not None and hops)

    def snapshot(self, *, has_sums: bool) -> Tensor:
        """1D, a copy: what `result` would be if all were averaged now; absent ones count as zeros.

        `has_sums`: some rank has sums of its own, so that all ranks look together.
        """
        self.wait()
        self.ensure_readable()
        numel = self._layout.padded if self._row.gradients.axis is None else self._layout.shard_numel
        total = self._comm.device.empty(numel, self.wide).zero_()
        if self.result is not None:
            total.copy_(self.result)
        if self._handed is not None:
            total.add_(self._handed[0], alpha=self._handed[1])
        if has_sums:
            self._add_sums(total)
        return total

    def _add_sums(self, total: Tensor) -> None:
        """Add the average of what is in the flat buffers of all ranks, which stay as they are."""
        flat = self._scratch.allocate(self._layout.padded, self.wide, StateKind.STAGING, self._unit).zero_()
        for slot, filled in zip(self._layout.slots, self._filled, strict=True):
            if filled and self._flat is not None:
                flat[slot.offset : slot.end].copy_(self._flat[slot.offset : slot.end]).mul_(self._scale)
        start, end = self._layout.shard_range(self._comm.shard_index)
        self._comm.reduce_scatter(flat, flat[start:end], 1.0, False, f"READ {self._name}").wait()
        if self._row.gradients.axis is None:
            self._comm.all_gather(flat, f"READ {self._name}").wait()
            start, end = 0, self._layout.padded
        total.add_(flat[start:end])
        self._scratch.free(flat)

    # ------------------------------------------------------------------------------------------------------- the end

    def forget(self, index: int) -> None:
        """As if one parameter had got no gradient. All ranks must do so at the same place."""
        self.wait()
        self.seen[index] = self._came_last[index] = False
        self._filled[index] = False  # a reduce counts it as zeros
        slot, first = self._layout.slots[index], 0
        if self._row.gradients.axis is not None:
            first = self._layout.shard_range(self._comm.shard_index)[0]
        low, high = max(slot.offset - first, 0), max(slot.end - first, 0)
        if self.result is not None:
            self.ensure_readable()
            self.result[low:high].zero_()
        if self._handed is not None:
            self._handed[0][low:high].zero_()

    def clear(self, was_used: bool | Tensor = False) -> None:
        """Forget everything, also a reduce that nobody will read. `was_used`: they were applied."""
        self.wait()
        if self._lost is not None:
            self._lost.end_step(was_used if self.commit is not CommitPolicy.IMMEDIATE else True)
        self.seen = [False] * len(self.seen)
        self._came_last = [False] * len(self.seen)
        self._drop_result()
        if self._flat is not None:
            self._scratch.free(self._flat)
            self._flat = None
        if self._handed is not None:
            self._scratch.free(self._handed[0])
            self._handed = None
        if self.state is not GradState.NONE:
            self.move(GradState.NONE)

    def _drop_result(self) -> None:
        if self.result is not None and self._lodging is None:
            self._scratch.free(self.result)
        self.result, self._lodging = None, None

    def _adopt(self, flat: Tensor) -> None:
        """What was reduced in place is the result; with an earlier result, it is added to that."""
        if self.result is None:
            self.result = flat
        else:
            self._widen()
            self.result.add_(flat)
            self._scratch.free(flat)

    def _widen(self) -> None:
        """More is to be added: go on in full precision."""
        assert self.result is not None
        if self.result.dtype != self._precision.accumulate or self._lodging is not None:
            self.ensure_readable()
            wide = self._take_result(self.result.numel(), self._precision.accumulate)
            wide.copy_(self.result)
            self._drop_result()
            self.result = wide

    def _take_result(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._scratch.allocate(numel, dtype, StateKind.GRADIENTS, self._unit)


def gone() -> NoReturn:
    """Gradients were given up for good."""
    raise ShardwellError(
        "these gradients are gone: their unit was updated at once. To read or change gradients before a step, or to "
        'add to them after a backward, set "shardwell": {"commit": "after_norm"}.'
    )
