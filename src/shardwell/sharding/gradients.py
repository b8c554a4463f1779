"""The gradients of a group: filled by backward, averaged over the ranks, accumulated over micro-steps.

Autograd produces the gradient of one parameter at a time. The hook copies it into the group's flat buffer immediately,
so that only the flat buffer outlives the hook; a later gradient of the same parameter is added. A reduce-scatter
empties the flat buffer into `result`, which holds what the optimizer will read. Reduce-scatters are additive: a
gradient that arrives after the reduce-scatter of its group has started opens a new flat buffer and is reduce-scattered
again. Nothing waits here: gradients arrive in an order that may differ between ranks, and the end of one reduce-scatter
may start another collective.

Reading gradients changes nothing: sums that are not averaged yet are averaged in a copy.
"""

from __future__ import annotations

import contextlib
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
    """The state of a group's gradients between two boundaries."""

    NONE = "none"
    PARTIAL = "partial"  # this rank's own sum, in the flat buffer; an earlier reduce-scatter may be in flight
    REDUCING = "reducing"
    REDUCED = "reduced"  # averaged, in `result`

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere


class Gradients:
    """The gradient buffers of one group."""

    result: Tensor | None  # 1D: this rank's shard, or all of it with specs that keep full gradients

    def __init__(
        self,
        name: str,
        unit: str,
        layout: Layout,
        spec: ShardingSpec,
        precision: GroupPrecision,
        comm: Collectives,
        temporary: TemporaryBuffers,
    ) -> None:
        self._name, self._unit, self._token = name, unit, f"REDUCE {name}"
        self._layout, self._spec, self._precision = layout, spec, precision
        self._comm, self._temporary = comm, temporary
        self._local = slice(*layout.shard_range(comm.shard_index))
        self.state = GradState.NONE
        self.result = None
        self.commit = spec.commit  # when an update made from them is committed
        self._elsewhere: Callable[[], None] | None = None  # waits for a result that is in another owner's memory
        self.accumulates_elsewhere = False  # another owner accumulates the micro-steps
        self._handed: tuple[Tensor, float] | None = None  # a micro-step to be accumulated, and its factor
        self._flat: Tensor | None = None  # 1D, padded
        self._filled = [False] * len(layout.slots)  # slots with a gradient in the flat buffer
        self.has_gradient = [False] * len(layout.slots)  # slots with a gradient since the last `clear`
        self._at_boundary = [False] * len(layout.slots)  # slots with a gradient at the boundary
        self.is_complete = False  # all of them; gradients of earlier micro-steps do not count
        self._scaled_late = False
        self._expected = 1.0  # the factor that late-scaled gradients in the flat buffer still need
        self._scale = 1.0  # the factor that the reduce-scatter applies
        self._pending: Work | None = None  # a reduce-scatter
        self._averaged: Tensor | None = None  # 1D: what it averages in place, with specs that keep full gradients
        self._publishing: Work | None = None  # the all-gather of that
        self._residual: QuantizationResidual | None = None  # the quantisation error that is not sent yet
        self.loss_scale = 1.0  # the loss scale of this step's gradients

    @property
    def is_partial(self) -> bool:
        """Whether the flat buffer holds gradients that are not averaged yet."""
        return self.state is GradState.PARTIAL

    def accumulate(self, index: int, grad: Tensor, scale: float, *, stays: bool, is_last: bool) -> None:
        """Add the gradient of one parameter to the flat buffer.

        `stays`: it will wait for later micro-steps, so it is kept in full precision. `is_last`: it arrives at the
        boundary.

        Wide gradients are scaled here, at no cost beyond the copy. 16-bit gradients are scaled where they are summed in
        fp32, except for the division that precedes the reduce-scatter.
        """
        self.has_gradient[index] = True
        if is_last and not self._at_boundary[index]:
            self._at_boundary[index] = True
            self.is_complete = all(self._at_boundary)
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
        """Allocate a flat buffer and decide where it is scaled; false if `grad` itself became the buffer."""
        wire = self._precision.wire
        dtype = self._precision.accumulate if stays else wire.dtype or self._precision.compute
        slots = self._layout.slots
        self.state = GradState.PARTIAL
        # In a group of one parameter without padding, autograd's gradient is the flat buffer, without a copy.
        alone = len(slots) == 1 and slots[0].numel == self._layout.padded and not stays
        adopt = (
            grad is not None
            and alone
            and wire.predivide == 1.0
            and not grad.is_sparse
            and grad.dtype == dtype
            and grad.stride() == slots[0].stride
        )
        # All ranks must make the same choice of where to scale, also a rank without a gradient.
        self._scaled_late = alone or dtype.itemsize <= 2
        self._expected = scale
        self._scale = scale * wire.predivide if self._scaled_late else 1.0
        self._filled = [adopt] * len(slots)
        if adopt and grad is not None:
            flat = grad.as_strided((grad.numel(),), (1,), grad.storage_offset())
            self._flat = self._temporary.adopt(flat, StateKind.GRADIENTS, self._unit)
        else:
            self._flat = self._temporary.allocate(self._layout.padded, dtype, StateKind.GRADIENTS, self._unit)
        return not adopt

    def reduce_scatter(self, scale: float, *, stays: bool, accumulates: bool, loss_scale: float = 1.0) -> None:
        """Start to reduce-scatter the flat buffer into `result`; missing gradients count as zeros."""
        self.loss_scale = loss_scale
        self.wait()
        if self.state is not GradState.PARTIAL:
            self._open(None, scale, stays)
        assert self._flat is not None
        self.state = GradState.REDUCING
        for slot, filled in zip(self._layout.slots, self._filled, strict=True):
            if not filled:
                self._flat[slot.offset : slot.end].zero_()
        if self._spec.reduce_codecs is not None:
            self._flat[self._layout.numel :].zero_()  # padding shares a quantisation block with values
        if self._scaled_late and scale != self._expected:  # other ranks may have begun with another micro-step
            self._flat.mul_(self._expected / scale)
            self._scale = scale * self._precision.wire.predivide
        flat, self._flat = self._flat, None
        if self._precision.wire.dtype not in (None, flat.dtype):
            flat = self._for_the_wire(flat, self._precision.wire.dtype, scale)
        if self._spec.gradients.axis is None:
            self._pending = self._average_whole(flat)
        elif self.accumulates_elsewhere and accumulates:
            self._pending = self._scatter_to_hand_over(flat)
        else:
            self._pending = self._scatter(flat, accumulates)

    def _for_the_wire(self, flat: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
        """Convert the flat buffer to the communication dtype; factors applied too early are divided out again."""
        sent = self._temporary.allocate(flat.numel(), dtype, StateKind.GRADIENTS, self._unit)
        if not self._scaled_late:
            self._scale = scale * self._precision.wire.predivide
            flat.div_(self._scale)
        sent.copy_(flat)
        self._temporary.free(flat)
        return sent

    def _scatter(self, flat: Tensor, accumulates: bool) -> Work:
        """Start the reduce-scatter into `result`; the result is as wide as the gradients and as what was sent."""
        dtype = self._precision.accumulate if accumulates else torch.promote_types(self._precision.compute, flat.dtype)
        as_it_is = self._scale == 1.0 and not accumulates and flat.dtype == dtype
        if self._comm.rank_group.size == 1 and self.result is None and as_it_is:
            return Work(partial(self._adopt, flat))
        adds = self.result is not None
        if self.result is None:
            self.result = self._temporary.allocate(self._layout.shard_numel, dtype, StateKind.GRADIENTS, self._unit)
        elif self.result.dtype.itemsize <= 2 or self._elsewhere is not None:
            self._widen()
        codecs, residual = self._spec.reduce_codecs, self._residual_for(flat) if self._spec.feedback else None
        work = self._comm.reduce_scatter(flat, self.result, self._scale, adds, self._token, codecs, residual=residual)
        return work.then(partial(self._temporary.free, flat))

    def _scatter_to_hand_over(self, flat: Tensor) -> Work:
        """Start the reduce-scatter of a micro-step that another owner accumulates."""
        if self._comm.rank_group.size == 1:
            return Work(partial(self._hand, flat, self._scale))
        numel, dtype = self._layout.shard_numel, self._precision.accumulate
        fresh = self._temporary.allocate(numel, dtype, StateKind.GRADIENTS, self._unit)
        codecs, residual = self._spec.reduce_codecs, self._residual_for(flat) if self._spec.feedback else None
        work = self._comm.reduce_scatter(flat, fresh, self._scale, False, self._token, codecs, residual=residual)

        def finish() -> None:
            self._hand(fresh, 1.0)
            self._temporary.free(flat)

        return work.then(finish)

    def _hand(self, fresh: Tensor, factor: float) -> None:
        """Hand over a micro-step to be accumulated elsewhere, added to one that was not fetched yet."""
        if self._handed is not None:
            before, its_factor = self._handed
            both = self._temporary.allocate(fresh.numel(), self._precision.accumulate, StateKind.GRADIENTS, self._unit)
            both.copy_(before).mul_(its_factor).add_(fresh, alpha=factor)
            self._temporary.free(before)
            self._temporary.free(fresh)
            fresh, factor = both, 1.0
        self._handed = fresh, factor

    def _residual_for(self, flat: Tensor) -> Tensor | None:
        """Return the quantisation error (1D) of earlier gradients, which this reduce-scatter adds and replaces."""
        codecs = self._spec.reduce_codecs
        if codecs is not None and self._residual is None:
            numel = self._comm.residual_numel(flat.numel(), codecs)
            self._residual = QuantizationResidual(numel, self._unit, self._temporary)
        return self._residual.joining(self._scale / self.loss_scale) if self._residual is not None else None

    def free(self) -> None:
        """Drop everything, the quantisation error included."""
        self.clear()
        if self._residual is not None:
            self._residual.free()
            self._residual = None

    def abandon(self) -> None:
        """Drop everything after a failure: what is in flight may never arrive."""
        in_flight = [work for work in (self._pending, self._publishing) if work is not None]
        self._pending = self._publishing = self._averaged = None
        for work in in_flight:
            with contextlib.suppress(Exception):  # the first error is known already
                work.wait()
        self.free()

    def _average_whole(self, flat: Tensor) -> Work:
        """Start to reduce-scatter into this rank's slice; `finish` then starts the all-gather of the slices."""
        self._averaged = flat
        return self._comm.reduce_scatter(flat, flat[self._local], self._scale, False, self._token)

    def start_next_hop(self) -> bool:
        """Start the second hop of a reduce-scatter where the host has to; false if no hop is left to start."""
        return self._pending is not None and self._pending.start_next_hop()

    def finish(self) -> None:
        """Wait for the reduce-scatter.

        With specs that keep full gradients this only starts the all-gather; `wait` waits for it.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            flat, self._averaged = self._averaged, None
            pending.wait()
            if flat is not None:
                published = self._comm.all_gather(flat, f"PUBLISH {self._name}", TrafficKind.PUBLISH)
                self._publishing = published.then(partial(self._adopt, flat))
            if self.state is GradState.REDUCING:
                self.state = GradState.REDUCED

    def move_result(self, memory: Tensor, arrive: Callable[[], None]) -> Tensor | None:
        """Move `result` to `memory` (1D), where it may be read once `arrive` returns.

        Return the memory that it had, or None if that belonged to another owner.
        """
        before = self.result if self._elsewhere is None else None
        self.result, self._elsewhere = memory, arrive
        return before

    @property
    def is_moved(self) -> bool:
        """Whether `result` is in another owner's memory."""
        return self._elsewhere is not None

    def discard_result(self) -> Tensor:
        """Discard the result (1D) for good and return its memory; later reads raise an error."""
        result = self.result
        assert result is not None
        self.move_result(result.new_empty(0), gone)
        return result

    def ensure_readable(self) -> None:
        """Wait until the host may read a result that is in another owner's memory."""
        if self._elsewhere is not None:
            self._elsewhere()

    def take_micro_step(self) -> tuple[Tensor, float] | None:
        """Return a micro-step (1D) to be accumulated elsewhere and its factor; None if there is nothing new."""
        handed, self._handed = self._handed, None
        return handed

    def wait(self) -> None:
        """Wait until `result` may be read."""
        if self._pending is not None:
            self.finish()
        if self._publishing is not None:
            publishing, self._publishing = self._publishing, None
            publishing.wait()

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype in which gradients are shown to the user."""
        own = torch.promote_types(self._precision.compute, self._precision.accumulate)
        return torch.promote_types(own, torch.float32)

    @property
    def has_any(self) -> bool:
        """Whether this rank has gradients of this boundary, averaged or not."""
        return self.state is not GradState.NONE

    @property
    def is_discarded(self) -> bool:
        """Whether the gradients were discarded for good."""
        return self._elsewhere is gone

    @property
    def needs_collective(self) -> bool:
        """Whether waiting for work in flight starts a collective that all ranks must start together."""
        hops = self._comm.host_starts_hops
        is_whole = self._spec.gradients.axis is None and self._comm.rank_group.size > 1
        return (self._pending is not None and (is_whole or hops)) or (self._publishing is not None and hops)

    def snapshot(self, *, has_sums: bool) -> Tensor:
        """Return a copy (1D) of what `result` would be if everything were averaged now.

        Missing gradients count as zeros. `has_sums`: some rank has sums that are not averaged yet, so all ranks must
        call this together.
        """
        self.wait()
        self.ensure_readable()
        numel = self._layout.padded if self._spec.gradients.axis is None else self._layout.shard_numel
        total = self._comm.device.empty(numel, self.wide).zero_()
        if self.result is not None:
            total.copy_(self.result)
        if self._handed is not None:
            total.add_(self._handed[0], alpha=self._handed[1])
        if has_sums:
            self._add_sums(total)
        return total

    def _add_sums(self, total: Tensor) -> None:
        """Add the average of the flat buffers of all ranks, and leave these unchanged."""
        flat = self._temporary.allocate(self._layout.padded, self.wide, StateKind.STAGING, self._unit).zero_()
        for slot, filled in zip(self._layout.slots, self._filled, strict=True):
            if filled and self._flat is not None:
                flat[slot.offset : slot.end].copy_(self._flat[slot.offset : slot.end]).mul_(self._scale)
        self._comm.reduce_scatter(flat, flat[self._local], 1.0, False, f"READ {self._name}").wait()
        if self._spec.gradients.axis is None:
            self._comm.all_gather(flat, f"READ {self._name}").wait()
            total.add_(flat)
        else:
            total.add_(flat[self._local])
        self._temporary.free(flat)

    # ------------------------------------------------------------------------------------------------------ clearing

    def forget(self, index: int) -> None:
        """Drop the gradient of one parameter. All ranks must do so at the same place in the program."""
        self.wait()
        self.has_gradient[index] = self._at_boundary[index] = self.is_complete = False
        self._filled[index] = False  # the reduce-scatter counts it as zeros
        slot, first = self._layout.slots[index], 0
        if self._spec.gradients.axis is not None:
            first = self._local.start
        low, high = max(slot.offset - first, 0), max(slot.end - first, 0)
        if self.result is not None:
            self.ensure_readable()
            self.result[low:high].zero_()
        if self._handed is not None:
            self._handed[0][low:high].zero_()

    def clear(self, was_used: bool | Tensor = False) -> None:
        """Drop all gradients, also a reduce-scatter in flight. `was_used`: they were applied."""
        self.wait()
        if self._residual is not None:
            self._residual.end_step(was_used if self.commit is not CommitPolicy.IMMEDIATE else True)
        self.has_gradient = [False] * len(self.has_gradient)
        self._at_boundary, self.is_complete = [False] * len(self.has_gradient), False
        if self.result is not None and self._elsewhere is None:
            self._temporary.free(self.result)
        self.result = self._elsewhere = None
        if self._flat is not None:
            self._temporary.free(self._flat)
            self._flat = None
        if self._handed is not None:
            self._temporary.free(self._handed[0])
            self._handed = None
        self.state = GradState.NONE

    def _adopt(self, flat: Tensor) -> None:
        """Make a buffer that was averaged in place the result, or add it to an earlier result."""
        if self.result is None:
            self.result = flat
        else:
            self._widen()
            self.result.add_(flat)
            self._temporary.free(flat)

    def _widen(self) -> None:
        """Convert the result to the accumulation dtype before more is added."""
        assert self.result is not None
        numel, dtype = self.result.numel(), self._precision.accumulate
        if self.result.dtype != dtype or self._elsewhere is not None:
            self.ensure_readable()
            wide = self._temporary.allocate(numel, dtype, StateKind.GRADIENTS, self._unit)
            wide.copy_(self.result)
            if self._elsewhere is None:
                self._temporary.free(self.result)
            self.result, self._elsewhere = wide, None


def gone() -> NoReturn:
    """Raise the error that gradients were discarded for good."""
    raise ShardwellError(
        "these gradients are gone: their unit was updated at once. To read or change gradients before a step, or to "
        'add to them after a backward, set "shardwell": {"commit": "after_norm"}.'
    )
