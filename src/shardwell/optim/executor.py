"""The executors that perform the updates of a step: the seam between the optimizer and offloading.

`ShardedOptimizer` decides whether a step is taken, and an `UpdateExecutor` takes it. `InlineExecutor` steps all units
on the current stream once the norm is known. The executors that update earlier, or on the host, are in `offload/`;
`engine/optimizer_setup.py` chooses one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from shardwell.optim.factory import OptimizerFactory
from shardwell.optim.full_tensors import ShardedFullTensors, needs_full_tensors
from shardwell.optim.grad_norm import NonfiniteNorm, SummedNumber, norm_of
from shardwell.optim.loss_scale import LossScale
from shardwell.optim.param_slices import ParamSlice, ParamSlices, SliceStates
from shardwell.parallel import MeshRoles
from shardwell.sharding import EngineContext, ShardedGroup, Unit
from shardwell.sharding.pending_update import PendingUpdate


@dataclass(frozen=True)
class StepOptions:
    """The settings of all optimizer steps."""

    scale: LossScale
    clip: float = 0.0  # the largest norm of the gradients; 0: no clipping
    nonfinite: NonfiniteNorm = NonfiniteNorm.AUTO
    buffer_count: int = 4  # pinned staging buffers for gradients, and update buffers for state on disk
    eight_bit_moments: bool = False  # Adam's moments on the host


class UpdateExecutor(Protocol):
    """The code that performs updates, and owns those in flight."""

    inner: Optimizer  # the torch optimizer
    slices: ParamSlices  # the tensors that it steps
    summed_with_norm: Sequence[SummedNumber]  # numbers that ranks exchange with the norm

    @property
    def vetoes_on_device(self) -> bool:
        """Whether updates can be skipped by a flag on the device, so that the host need not know the norm."""

    def reduced(self, unit: Unit, at_boundary: bool) -> None:
        """Take averaged gradients of a unit, during backward."""

    def norms(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield the norms of this rank's gradients, each with whether every rank has the same gradient."""

    def step(self, norm: Tensor, clip: Tensor | None, unseen: set[str]) -> Iterator[tuple[Unit, PendingUpdate | None]]:
        """Update all units, and yield each one that is to be published, with what there is to wait for.

        `clip` is the factor of the gradients. Parameters in `unseen` have no gradient on any rank.
        """

    def skip_step(self) -> None:
        """Note that this boundary has no step, because the norm is not finite."""

    def drop_gradients(self, was_used: bool | Tensor, *, together: bool) -> None:
        """Drop the gradients of this boundary; with `together`, all ranks do so, and continue."""

    def describe_partial(self, *, is_late: bool) -> tuple[bool, str]:
        """Return whether all values are as before a step that is not finite, and a sentence that says so.

        If anything may have been updated, all ranks must call it. `is_late`: a backward may have run since then.
        """

    def gradients_read(self, unit: Unit) -> None:
        """Note that the user reads a unit's gradients before the step."""

    def gradients_change(self, unit: Unit) -> None:
        """Prepare for a change of a unit's gradients by the user before the step."""

    def gradients_dropped(self, what: str) -> None:
        """Note that the user drops the gradients of this boundary; `what` says how."""

    def stop_watching(self) -> None:
        """Accept any use of the units: everything of this boundary will be dropped or overwritten."""

    def is_updated_early(self, unit: Unit) -> bool:
        """Return whether the unit had its update of this boundary before the step, or could have had it."""

    def state(self, unit: Unit, *, changes: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a unit's optimizer state is in memory; with `changes`, changes are kept."""

    def pack_state(self, shard: ParamSlice, state: dict[str, Any]) -> dict[str, Any]:
        """Convert the state of a slice from torch's format to the stored format."""

    def swapped_states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield each stepped tensor whose state is not in memory, with a copy of its state."""

    def adopt_states(self) -> None:
        """Store state that other code gave the inner optimizer."""

    def enter(self, unit: Unit) -> None:
        """Add a unit that was rebuilt; its slices exist."""

    def leave(self, unit: Unit) -> None:
        """Remove a unit whose slices are about to go."""


def make_inner(factory: OptimizerFactory, units: Sequence[Unit], roles: MeshRoles) -> tuple[Optimizer, ParamSlices]:
    """Return the inner torch optimizer over this rank's slices of the units' master weights, and the slices."""
    slices = ParamSlices(units, one_per_parameter=False)
    inner = _made(factory, slices)
    if needs_full_tensors(inner):  # a tensor must not span several parameters
        slices = ParamSlices(units, one_per_parameter=True)
        inner = _made(factory, slices)
        inner.whole = ShardedFullTensors(slices, inner, roles)  # type: ignore[attr-defined]
    inner.state = SliceStates(dict, inner.state)
    return inner, slices


def _made(factory: OptimizerFactory, slices: ParamSlices) -> Optimizer:
    labels = range(1 + max(factory.labels.values(), default=0))
    return factory.make([[shard.tensor for shard in slices if shard.label == label] for label in labels])


class InlineExecutor:
    """Steps units with the inner torch optimizer on the current stream, after the norm.

    It steps a few units at a time, so that fp32 master weights that exist only during a step stay small, and so that
    updated units are all-gathered while the next ones are stepped.
    """

    def __init__(self, inner: Optimizer, slices: ParamSlices, context: EngineContext, scale: LossScale) -> None:
        self.inner, self.slices = inner, slices
        self.summed_with_norm: Sequence[SummedNumber] = ()
        self.elsewhere: set[ShardedGroup] = set()  # groups that another executor steps
        self._context, self._scale = context, scale
        self.vetoes_on_device = self._is_fused()
        full = getattr(inner, "whole", None)
        self._full_tensors = full if isinstance(full, ShardedFullTensors) else None
        self._own_step = vars(inner).get("step")  # a replacement of `step`, read before the engine redirects it

    def _is_fused(self) -> bool:
        """Return whether all groups are stepped by fused CUDA kernels, which read `found_inf`."""
        if not self._context.device.has_streams or not self.inner.defaults.get("fused"):
            return False
        return all(group.get("fused") for group in self.inner.param_groups)

    # ----------------------------------------------------------------------------------------------------- step

    def norms(self) -> Iterator[tuple[Tensor, bool]]:
        for unit in self.slices.units:
            for shard in self.slices.by_unit[unit.index]:
                if shard.group.gradients.reduced.tensor is not None:
                    yield norm_of(shard)

    def step(self, norm: Tensor, clip: Tensor | None, unseen: set[str]) -> Iterator[tuple[Unit, PendingUpdate | None]]:
        for chunk in self.slices.chunks:
            self._update(chunk, clip, unseen)
            for unit in chunk:
                yield unit, None

    def _update(self, units: Sequence[Unit], clip: Tensor | None, unseen: set[str]) -> None:
        """Step what these units have gradients of."""
        with contextlib.ExitStack() as stack:
            groups: list[ShardedGroup] = []
            for unit in units:
                for group in unit.trainable:
                    if group.gradients.reduced.tensor is not None and group not in self.elsewhere:
                        groups.append(group)
                        if not group.storage.is_always_open:
                            stack.enter_context(group.storage.open(changes=True))
            if not groups:
                return
            if self._full_tensors is not None:
                self._full_tensors.begin(groups, unseen)
            shards: list[ParamSlice] = []
            for unit in units:
                mine = self.slices.by_unit[unit.index]
                shards += self.slices.seen(unit, unseen, self._split, self.elsewhere) if unseen else mine
            self._step_slices(shards, clip)

    def _split(self, unit: Unit, shard: ParamSlice) -> list[ParamSlice]:
        return self.slices.part(unit, shard, self.inner)

    def _step_slices(self, shards: list[ParamSlice], clip: Tensor | None) -> None:
        """Step these slices, and nothing else, with gradients that are unscaled and clipped."""
        factor = clip if self._scale.value == 1.0 else (1.0 if clip is None else clip) / self._scale.value
        param_groups = self.inner.param_groups
        all_tensors: list[list[Tensor]] = []
        for param_group in param_groups:
            all_tensors.append(param_group["params"])
            param_group["params"] = []
        try:
            for shard in shards:
                result = shard.group.gradients.reduced.tensor
                if result is None or shard.label < 0 or shard.group in self.elsewhere:
                    continue
                gradient = result[shard.span].to(shard.tensor)
                if factor is not None:
                    gradient.mul_(factor.to(gradient) if isinstance(factor, Tensor) else factor)
                shard.tensor.grad = gradient
                param_groups[shard.label]["params"].append(shard.tensor)
            self._step_inner()
        finally:
            for param_group, tensors in zip(param_groups, all_tensors, strict=True):
                param_group["params"] = tensors
            for shard in shards:
                shard.tensor.grad = None

    def _step_inner(self) -> None:
        """Run the inner optimizer's step without its hooks: `ShardedOptimizer` runs them once for all chunks."""
        if self._own_step is not None and not hasattr(self._own_step, "_wrapped_by_lr_sched"):
            self._own_step()
            return
        step: Any = type(self.inner).step
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(self.inner)

    def skip_step(self) -> None: ...

    def drop_gradients(self, was_used: bool | Tensor, *, together: bool) -> None:
        for unit in self.slices.units:
            for group in unit.trainable:
                group.gradients.clear(was_used)
            for shard in self.slices.by_unit[unit.index]:
                shard.tensor.grad = None

    def describe_partial(self, *, is_late: bool) -> tuple[bool, str]:
        return True, "the step was not applied and parameters and optimizer state are as before"

    # --------------------------------------------------------------------------------------- before the step

    def reduced(self, unit: Unit, at_boundary: bool) -> None: ...

    def gradients_read(self, unit: Unit) -> None: ...

    def gradients_change(self, unit: Unit) -> None: ...

    def gradients_dropped(self, what: str) -> None: ...

    def stop_watching(self) -> None: ...

    def is_updated_early(self, unit: Unit) -> bool:
        return False

    # --------------------------------------------------------------------------------------- state and units

    def state(self, unit: Unit, *, changes: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def pack_state(self, shard: ParamSlice, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def swapped_states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        return iter(())

    def adopt_states(self) -> None:
        self.vetoes_on_device = self._is_fused()  # a state dictionary of torch's format says how groups are stepped

    def enter(self, unit: Unit) -> None: ...

    def leave(self, unit: Unit) -> None: ...
