"""The gradients of a group: filled by backward, averaged over the ranks, accumulated over micro-steps.

Autograd produces the gradient of one parameter at a time. The hook copies it into the group's flat buffer, its bucket,
immediately, so that only the bucket outlives the hook; a later gradient of the same parameter is added. A
reduce-scatter empties the bucket into `reduced`, which holds what the optimizer will read. Reduce-scatters are
additive: a gradient that arrives after the reduce-scatter of its group has started opens a new bucket and is
reduce-scattered again. Nothing waits here: gradients arrive in an order that may differ between ranks, and the end of
one reduce-scatter may start another collective.

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
from shardwell.parallel.joined import Joined, JoinedRoute
from shardwell.sharding.layout import Layout
from shardwell.sharding.residual import QuantizationResidual
from shardwell.sharding.spec import CommitPolicy, GroupPrecision, ShardingSpec


class GradState(enum.Enum):
    """The state of a group's gradients between two boundaries."""

    NONE = "none"
    PARTIAL = "partial"  # this rank's own sum, in the bucket; an earlier reduce-scatter may be in flight
    REDUCING = "reducing"
    REDUCED = "reduced"  # averaged, in `reduced`

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere


class GradientBucket:
    """The flat buffer of a group in which gradients of this rank wait for their reduce-scatter."""

    def __init__(self, layout: Layout, precision: GroupPrecision, unit: str, temporary: TemporaryBuffers) -> None:
        self.layout, self._precision = layout, precision
        self.unit, self._temporary = unit, temporary
        self.flat: Tensor | None = None  # 1D, padded; None if the bucket is empty
        self.scale = 1.0  # the factor that the reduce-scatter applies
        self._filled = [False] * len(layout.slots)  # slots with a gradient in the flat buffer
        self._scaled_late = False
        self._expected = 1.0  # the factor that late-scaled gradients in the flat buffer still need

    def add(self, index: int, grad: Tensor, scale: float, stays: bool) -> None:
        """Add the gradient of one parameter.

        Wide gradients are scaled here, at no cost beyond the copy. 16-bit gradients are scaled where they are summed in
        fp32, except for the division that precedes the reduce-scatter.
        """
        if self.flat is None and not self._open(grad, scale, stays):
            return
        assert self.flat is not None
        slot = self.layout.slots[index]
        view = self.flat.as_strided(slot.shape, slot.stride, slot.offset)
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
        slots = self.layout.slots
        # In a group of one parameter without padding, autograd's gradient is the flat buffer, without a copy.
        alone = len(slots) == 1 and slots[0].numel == self.layout.padded and not stays
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
        self.scale = scale * wire.predivide if self._scaled_late else 1.0
        self._filled = [adopt] * len(slots)
        if adopt and grad is not None:
            flat = grad.as_strided((grad.numel(),), (1,), grad.storage_offset())
            self.flat = self._temporary.adopt(flat, StateKind.GRADIENTS, self.unit)
        else:
            self.flat = self._temporary.allocate(self.layout.padded, dtype, StateKind.GRADIENTS, self.unit)
        return not adopt

    def take(self, scale: float, *, stays: bool, clears_padding: bool) -> Tensor:
        """Return the flat buffer (1D) as it is sent, and leave the bucket empty; missing gradients count as zeros."""
        if self.flat is None:
            self._open(None, scale, stays)
        assert self.flat is not None
        flat, self.flat = self.flat, None
        for slot, filled in zip(self.layout.slots, self._filled, strict=True):
            if not filled:
                flat[slot.offset : slot.end].zero_()
        if clears_padding:
            flat[self.layout.numel :].zero_()
        if self._scaled_late and scale != self._expected:  # other ranks may have begun with another micro-step
            flat.mul_(self._expected / scale)
            self.scale = scale * self._precision.wire.predivide
        if self._precision.wire.dtype not in (None, flat.dtype):
            flat = self._for_the_wire(flat, self._precision.wire.dtype, scale)
        return flat

    def _for_the_wire(self, flat: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
        """Convert the flat buffer to the communication dtype; factors applied too early are divided out again."""
        sent = self._temporary.allocate(flat.numel(), dtype, StateKind.GRADIENTS, self.unit)
        if not self._scaled_late:
            self.scale = scale * self._precision.wire.predivide
            flat.div_(self.scale)
        sent.copy_(flat)
        self._temporary.free(flat)
        return sent

    def copy_to(self, other: Tensor) -> None:
        """Copy the gradients that are in the bucket, scaled, to their slots in another flat buffer."""
        for slot, filled in zip(self.layout.slots, self._filled, strict=True):
            if filled and self.flat is not None:
                other[slot.offset : slot.end].copy_(self.flat[slot.offset : slot.end]).mul_(self.scale)

    def forget(self, index: int) -> None:
        """Drop the gradient of one parameter: the reduce-scatter counts it as zeros."""
        self._filled[index] = False

    def clear(self) -> None:
        """Drop the gradients in a bucket that is not empty."""
        assert self.flat is not None
        self._temporary.free(self.flat)
        self.flat = None


class ReducedGradient:
    """The averaged gradients of a group that the optimizer reads, in memory of the group's or of another owner's."""

    def __init__(self, numel: int, precision: GroupPrecision, unit: str, temporary: TemporaryBuffers) -> None:
        self.tensor: Tensor | None = None  # 1D
        self.accumulates_elsewhere = False  # another owner accumulates the micro-steps
        self.micro_step: tuple[Tensor, float] | None = None  # one to be accumulated elsewhere, and its factor
        self._arrive: Callable[[], None] | None = None  # waits for a tensor that is in another owner's memory
        self._numel, self._precision = numel, precision
        self._unit, self._temporary = unit, temporary

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype in which gradients are shown to the user."""
        own = torch.promote_types(self._precision.compute, self._precision.accumulate)
        return torch.promote_types(own, torch.float32)

    def may_be(self, flat: Tensor, accumulates: bool) -> bool:
        """Return whether a buffer that one rank would send to itself can become the result as it is."""
        is_wide = flat.dtype == torch.promote_types(self._precision.compute, flat.dtype)
        return self.tensor is None and not accumulates and is_wide

    def prepare(self, sent: torch.dtype, accumulates: bool) -> Tensor:
        """Return the memory that a reduce-scatter writes to, or adds to: as wide as gradients and as what is sent."""
        if self.tensor is None:
            own = self._precision
            dtype = own.accumulate if accumulates else torch.promote_types(own.compute, sent)
            self.tensor = self._temporary.allocate(self._numel, dtype, StateKind.GRADIENTS, self._unit)
        elif self.tensor.dtype.itemsize <= 2 or self._arrive is not None:
            self._widen()
        return self.tensor

    def allocate_micro_step(self) -> Tensor:
        """Return memory for a micro-step that is accumulated elsewhere."""
        return self._temporary.allocate(self._numel, self._precision.accumulate, StateKind.GRADIENTS, self._unit)

    def add(self, flat: Tensor) -> None:
        """Make a buffer that was averaged in place the result, or add it to an earlier result."""
        if self.tensor is None:
            self.tensor = flat
        else:
            self._widen()
            self.tensor.add_(flat)
            self._temporary.free(flat)

    def _widen(self) -> None:
        """Convert the result to the accumulation dtype before more is added."""
        assert self.tensor is not None
        numel, dtype = self.tensor.numel(), self._precision.accumulate
        if self.tensor.dtype != dtype or self._arrive is not None:
            self.ensure_readable()
            wide = self._temporary.allocate(numel, dtype, StateKind.GRADIENTS, self._unit)
            wide.copy_(self.tensor)
            if self._arrive is None:
                self._temporary.free(self.tensor)
            self.tensor, self._arrive = wide, None

    def move(self, memory: Tensor, arrive: Callable[[], None]) -> Tensor | None:
        """Move the result to `memory` (1D), where it may be read once `arrive` returns.

        Return the memory that it had, or None if that belonged to another owner.
        """
        before = self.tensor if self._arrive is None else None
        self.tensor, self._arrive = memory, arrive
        return before

    @property
    def is_moved(self) -> bool:
        """Whether the result is in another owner's memory."""
        return self._arrive is not None

    def discard(self) -> Tensor:
        """Discard the result (1D) for good and return its memory; later reads raise an error."""
        result = self.tensor
        assert result is not None
        self.move(result.new_empty(0), gone)
        return result

    @property
    def is_discarded(self) -> bool:
        """Whether the gradients were discarded for good."""
        return self._arrive is gone

    def ensure_readable(self) -> None:
        """Wait until the host may read a result that is in another owner's memory."""
        if self._arrive is not None:
            self._arrive()

    def hand_over(self, fresh: Tensor, factor: float) -> None:
        """Hand over a micro-step to be accumulated elsewhere, added to one that was not fetched yet."""
        if self.micro_step is not None:
            before, its_factor = self.micro_step
            both = self._temporary.allocate(fresh.numel(), self._precision.accumulate, StateKind.GRADIENTS, self._unit)
            both.copy_(before).mul_(its_factor).add_(fresh, alpha=factor)
            self._temporary.free(before)
            self._temporary.free(fresh)
            fresh, factor = both, 1.0
        self.micro_step = fresh, factor

    def take_micro_step(self) -> tuple[Tensor, float] | None:
        """Return a micro-step (1D) to be accumulated elsewhere and its factor; None if there is nothing new."""
        handed, self.micro_step = self.micro_step, None
        return handed

    def copy_to(self, total: Tensor) -> None:
        """Copy the result to `total` (1D, zeros), with a micro-step that was not fetched yet."""
        self.ensure_readable()
        if self.tensor is not None:
            total.copy_(self.tensor)
        if self.micro_step is not None:
            total.add_(self.micro_step[0], alpha=self.micro_step[1])

    def zero(self, part: slice) -> None:
        """Set a part to zeros."""
        if self.tensor is not None:
            self.ensure_readable()
            self.tensor[part].zero_()
        if self.micro_step is not None:
            self.micro_step[0][part].zero_()

    def clear(self) -> None:
        """Drop the result."""
        if self.tensor is not None and self._arrive is None:
            self._temporary.free(self.tensor)
        self.tensor = self._arrive = None
        if self.micro_step is not None:
            self._temporary.free(self.micro_step[0])
            self.micro_step = None


class Gradients:
    """The gradients of one group: which have arrived, and their way from the bucket to the averaged result."""

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
        self._name, self.spec, self._comm, self._temporary = name, spec, comm, temporary
        self._local = slice(*layout.shard_range(comm.shard_index))
        self.state = GradState.NONE
        self.bucket = GradientBucket(layout, precision, unit, temporary)
        numel = layout.padded if spec.gradients.axis is None else layout.shard_numel
        self.reduced = ReducedGradient(numel, precision, unit, temporary)
        self.has_gradient = [False] * len(layout.slots)  # slots with a gradient since the last `clear`
        self._at_boundary = [False] * len(layout.slots)  # slots with a gradient at the boundary
        self.loss_scale = 1.0  # the loss scale of this step's gradients
        self._pending: Work | None = None  # a reduce-scatter
        self._averaged: Tensor | None = None  # 1D: what it averages in place, with specs that keep full gradients
        self._publishing: Work | None = None  # the all-gather of that
        self._residual: QuantizationResidual | None = None  # the quantisation error that is not sent yet

    @property
    def result(self) -> Tensor | None:
        """Return the averaged gradients (1D): this rank's shard, or all of them with specs that keep full gradients."""
        return self.reduced.tensor

    @property
    def is_complete(self) -> bool:
        """Whether all parameters have a gradient at the boundary; those of earlier micro-steps do not count."""
        return all(self._at_boundary)

    @property
    def is_partial(self) -> bool:
        """Whether the bucket holds gradients that are not averaged yet."""
        return self.state is GradState.PARTIAL

    def accumulate(self, index: int, grad: Tensor, scale: float, *, stays: bool, is_last: bool) -> None:
        """Add the gradient of one parameter to the bucket.

        `stays`: it will wait for later micro-steps, so it is kept in full precision. `is_last`: it arrives at the
        boundary.
        """
        self.has_gradient[index] = True
        if is_last:
            self._at_boundary[index] = True
        self.state = GradState.PARTIAL
        self.bucket.add(index, grad, scale, stays)

    def reduce_scatter(
        self, scale: float, *, stays: bool, accumulates: bool, loss_scale: float = 1.0, joined: Joined | None = None
    ) -> None:
        """Start to reduce-scatter the bucket into `reduced`, or let `joined` do so; missing gradients are zeros."""
        self.loss_scale = loss_scale
        self.wait()
        self.state = GradState.REDUCING
        bucket, reduced, codecs = self.bucket, self.reduced, self.spec.reduce_codecs
        comm = self._comm if joined is None else joined.over(self._comm)
        # padding shares a quantisation block with values
        flat = bucket.take(scale, stays=stays, clears_padding=codecs is not None)
        if self.spec.gradients.axis is None:  # into this rank's slice; `finish` starts the all-gather of the slices
            self._averaged = flat
            self._pending = comm.reduce_scatter(flat, flat[self._local], bucket.scale, False, f"REDUCE {self._name}")
            return
        if reduced.accumulates_elsewhere and accumulates:
            self._pending = self._scatter_micro_step(flat, comm)
            return
        if comm.rank_group.size == 1 and bucket.scale == 1.0 and reduced.may_be(flat, accumulates):
            self._pending = Work(partial(reduced.add, flat))
            return
        adds, into = reduced.tensor is not None, reduced.prepare(flat.dtype, accumulates)
        residual = self._residual_for(flat) if self.spec.feedback else None
        work = comm.reduce_scatter(flat, into, bucket.scale, adds, f"REDUCE {self._name}", codecs, residual=residual)
        self._pending = work.then(partial(self._temporary.free, flat))

    def _scatter_micro_step(self, flat: Tensor, comm: Collectives | JoinedRoute) -> Work:
        """Start the reduce-scatter of a micro-step that another owner accumulates."""
        scale, reduced = self.bucket.scale, self.reduced
        if self._comm.rank_group.size == 1:
            return Work(partial(reduced.hand_over, flat, scale))
        fresh = reduced.allocate_micro_step()
        codecs, residual = self.spec.reduce_codecs, self._residual_for(flat) if self.spec.feedback else None
        token = f"REDUCE {self._name}"
        work = comm.reduce_scatter(flat, fresh, scale, False, token, codecs, residual=residual)
        return work.then(partial(reduced.hand_over, fresh, 1.0)).then(partial(self._temporary.free, flat))

    def _residual_for(self, flat: Tensor) -> Tensor | None:
        """Return the quantisation error (1D) of earlier gradients, which this reduce-scatter adds and replaces."""
        codecs = self.spec.reduce_codecs
        if codecs is not None and self._residual is None:
            numel = self._comm.residual_numel(flat.numel(), codecs)
            self._residual = QuantizationResidual(numel, self.bucket.unit, self._temporary)
        return self._residual.scaled_to(self.bucket.scale / self.loss_scale) if self._residual is not None else None

    def start_next_hop(self) -> bool:
        """Start the second hop of a reduce-scatter where the host has to; false if no hop is left to start."""
        return self._pending is not None and self._pending.start_next_hop()

    def finish(self, joined: Joined | None = None) -> None:
        """Wait for the reduce-scatter.

        With specs that keep full gradients this, or `joined`, only starts the all-gather; `wait` waits for it.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            flat, self._averaged = self._averaged, None
            pending.wait()
            if flat is not None:
                comm = self._comm if joined is None else joined.over(self._comm)
                published = comm.all_gather(flat, f"PUBLISH {self._name}", TrafficKind.PUBLISH)
                self._publishing = published.then(partial(self.reduced.add, flat))
            if self.state is GradState.REDUCING:
                self.state = GradState.REDUCED

    def wait(self) -> None:
        """Wait until `result` may be read."""
        if self._pending is not None:
            self.finish()
        if self._publishing is not None:
            publishing, self._publishing = self._publishing, None
            publishing.wait()

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def has_any(self) -> bool:
        """Whether this rank has gradients of this boundary, averaged or not."""
        return self.state is not GradState.NONE

    @property
    def needs_collective(self) -> bool:
        """Whether waiting for work in flight starts a collective that all ranks must start together."""
        hops = self._comm.host_starts_hops
        is_whole = self.spec.gradients.axis is None and self._comm.rank_group.size > 1
        return (self._pending is not None and (is_whole or hops)) or (self._publishing is not None and hops)

    def snapshot(self, *, has_sums: bool) -> Tensor:
        """Return a copy (1D) of what `result` would be if everything were averaged now.

        Missing gradients count as zeros. `has_sums`: some rank has sums that are not averaged yet, so all ranks must
        call this together.
        """
        self.wait()
        layout = self.bucket.layout
        numel = layout.padded if self.spec.gradients.axis is None else layout.shard_numel
        total = self._comm.device.empty(numel, self.reduced.wide).zero_()
        self.reduced.copy_to(total)
        if has_sums:
            self._add_sums(total)
        return total

    def _add_sums(self, total: Tensor) -> None:
        """Add the average of the buckets of all ranks, and leave these unchanged."""
        bucket, wide = self.bucket, self.reduced.wide
        flat = self._temporary.allocate(bucket.layout.padded, wide, StateKind.STAGING, bucket.unit).zero_()
        bucket.copy_to(flat)
        self._comm.reduce_scatter(flat, flat[self._local], 1.0, False, f"READ {self._name}").wait()
        if self.spec.gradients.axis is None:
            self._comm.all_gather(flat, f"READ {self._name}").wait()
            total.add_(flat)
        else:
            total.add_(flat[self._local])
        self._temporary.free(flat)

    # ------------------------------------------------------------------------------------------------------ clearing

    def forget(self, index: int) -> None:
        """Drop the gradient of one parameter. All ranks must do so at the same place in the program."""
        self.wait()
        self.has_gradient[index] = self._at_boundary[index] = False
        self.bucket.forget(index)
        slot = self.bucket.layout.slots[index]
        first = 0 if self.spec.gradients.axis is None else self._local.start
        self.reduced.zero(slice(max(slot.offset - first, 0), max(slot.end - first, 0)))

    def clear(self, was_used: bool | Tensor = False) -> None:
        """Drop all gradients, also a reduce-scatter in flight. `was_used`: they were applied."""
        self.wait()
        if self._residual is not None:
            self._residual.end_step(was_used if self.spec.commit is not CommitPolicy.IMMEDIATE else True)
        self.has_gradient = [False] * len(self.has_gradient)
        self._at_boundary = [False] * len(self.has_gradient)
        self.reduced.clear()
        if self.bucket.flat is not None:
            self.bucket.clear()
        self.state = GradState.NONE

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


def gone() -> NoReturn:
    """Raise the error that gradients were discarded for good."""
    raise ShardwellError(
        "these gradients are gone: their unit was updated at once. To read or change gradients before a step, or to "
        'add to them after a backward, set "shardwell": {"commit": "after_norm"}.'
    )
