"""The part of an optimizer step on the host: which units are updated before the norm, and with which factor."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell.errors import ShardwellError
from shardwell.kernels import Moment8bit
from shardwell.memory import Event
from shardwell.offload.cpu_kernels import kernel_for
from shardwell.offload.host_updates import HostPending, HostUpdateQueue
from shardwell.offload.optimizer_swap import OptimizerSwapper
from shardwell.offload.speculation import hyperparameters_of
from shardwell.offload.storage import swapped_masters
from shardwell.offload.worker import Worker
from shardwell.optim.grad_norm import Norm, norm_of, sum_of_squares
from shardwell.optim.loss_scale import LossScale
from shardwell.optim.param_slices import ParamSlice, ParamSlices
from shardwell.sharding import EngineContext, Unit
from shardwell.sharding.spec import CommitPolicy


def host_updates(
    inner: Optimizer,
    units: list[Unit],
    context: EngineContext,
    num_slots: int,
    store: OptimizerSwapper | None,
    *,
    eight_bits: bool,
) -> HostUpdateQueue | None:
    """Return the queue of host updates, or None if no state below the device can be stepped by a kernel."""
    mine = [unit for unit in units if any(group.is_stepped_on_host for group in unit.trainable)]
    if not mine:
        if eight_bits and any(unit.trainable for unit in units):
            warnings.warn(
                'shardwell.moments "8bit" has no effect: no optimizer state rests on the host or on disk. Is '
                "offload_optimizer.ratio 0, or is there room on the device?",
                stacklevel=2,
            )
        return None
    cores = context.device.update_cores()
    threads = torch.get_num_threads() if cores is None else len(cores)
    kernel = kernel_for(inner, threads, eight_bits=eight_bits, beside_gpu=context.device.is_cuda)
    groups = [group for unit in mine for group in unit.trainable if group.is_stepped_on_host]
    if kernel is None or any(group.precision.master is not torch.float32 for group in groups):
        if any(swapped_masters(group) is not None for group in groups):
            raise ShardwellError(
                f"optimizer state on disk is stepped by kernels, and there is none for {type(inner).__name__} with "
                f"these options over {groups[0].precision.master}: use AdamW, Adam, SGD, Adagrad or Lion over fp32 "
                'masters, or set offload_optimizer.device to "cpu"'
            )
        if eight_bits:
            raise ShardwellError(
                'shardwell.moments "8bit" needs a kernel, and there is none for '
                f"{type(inner).__name__} with these options over {groups[0].precision.master}: use AdamW or Adam "
                'without amsgrad and the like, over fp32 masters, or set it to "fp32"'
            )
        return None
    return HostUpdateQueue(context, inner, kernel, mine, Worker("shardwell host updates", cores), num_slots, store)


class HostExecutor:
    """Steps the units whose optimizer state is stored on the host or on disk."""

    def __init__(
        self,
        host: HostUpdateQueue,
        inner: Optimizer,
        shards: ParamSlices,
        context: EngineContext,
        scale: LossScale,
        clip: float,
    ) -> None:
        self.host = host
        self._inner, self._shards, self._context = inner, shards, context
        self._scale, self._clip = scale, clip
        self._norms: dict[int, list[tuple[Norm, bool]]] = {}  # by unit: norms of gradients that were copied to the host

    # ------------------------------------------------------------------------------------------------- backward

    def take(self, unit: Unit, *, is_complete: bool) -> None:
        """Copy a unit's reduced gradients of this boundary to the host, and update the unit if it need not wait."""
        commit = next((group.row.commit for group in unit.trainable if group.is_stepped_on_host), None)
        if commit is None:
            return
        self.host.take_back(unit)  # a gradient came late: the update was computed without it
        goes_ahead = is_complete and self._goes_ahead(unit, commit)
        shards = [s for s in self._shards.of(unit) if s.group.is_stepped_on_host and s.gradient is not None]
        self._norms[unit.index] = [self._norm_of(shard) for shard in shards]
        self.host.descent.bring_down(unit, waits=not goes_ahead or commit is CommitPolicy.SPECULATIVE)
        if goes_ahead:
            self._start_ahead(unit, commit)

    def gradients_change(self, unit: Unit) -> None:
        """Drop the norm of a unit whose gradients change. An immediate update that has begun cannot begin again."""
        if self.host.is_queued(unit):
            raise ShardwellError(
                f"the update of unit '{unit.name}' has begun with the gradients that backward gave. To change them "
                'before a step, set "shardwell": {"commit": "after_norm"}.'
            )
        self._norms.pop(unit.index, None)

    def _goes_ahead(self, unit: Unit, commit: CommitPolicy) -> bool:
        if commit is CommitPolicy.SPECULATIVE:
            return self.host.may_speculate(self._shards.of(unit))
        return commit is CommitPolicy.IMMEDIATE

    def _norm_of(self, shard: ParamSlice) -> tuple[Norm, bool]:
        """Return the norm of a shard's gradient.

        It is computed on the device if the gradient is there, which is cheap and gives the same bits as without
        offload. Sums over micro-steps are on the host only.
        """
        assert shard.gradient is not None
        if not self.host.descent.adds_up(shard.group):
            return norm_of(shard)
        return self.host.descent.norm_later(shard.group, shard.gradient), shard.group.row.gradients.axis is None

    def _start_ahead(self, unit: Unit, commit: CommitPolicy) -> None:
        """Queue a unit's update before the norm is known."""
        if self.host.is_queued(unit):
            raise ShardwellError(f"unit '{unit.name}' got another gradient after its update; commit after the norm")
        factor = ClipFromNorm(*self._own_norm(unit), self._scale.value)
        assumed = 1.0 / self._scale.value if commit is CommitPolicy.SPECULATIVE else None
        self.host.start(unit, self._shards.of(unit), hyperparameters_of(self._inner), factor, assumed)

    def _own_norm(self, unit: Unit) -> tuple[Callable[[], float], Event]:
        """Return the norm of a unit's gradients on this rank, and the event after which it is known."""
        norms = [norm for norm, _ in self._norms[unit.index]]
        later = [norm for norm in norms if not isinstance(norm, Tensor)]
        here = sum_of_squares([norm for norm in norms if isinstance(norm, Tensor)], self._context.device).sqrt()
        read = self._context.device.read_async(here)
        return lambda: math.hypot(float(read.get()), *(norm() for norm in later)), read.event

    # ----------------------------------------------------------------------------------------------------- step

    def norms(self, unit: Unit) -> Iterator[tuple[Tensor, bool]]:
        """Yield the norms of gradients that were copied to the host, and whether every rank has the same gradient."""
        for norm, is_whole in self._norms.get(unit.index, []):
            yield norm if isinstance(norm, Tensor) else self._context.device.scalar(norm(), torch.float64), is_whole

    def norms_at_once(self, unit: Unit) -> list[Norm] | None:
        """Return the norms of the gradients of an immediate update; None if the unit waits for the global norm."""
        commits = {group.row.commit for group in unit.trainable if group.is_stepped_on_host}
        if CommitPolicy.IMMEDIATE not in commits or not self.host.is_queued(unit):
            return None
        return [norm for norm, _ in self._norms[unit.index]]

    def has_norms(self, unit: Unit) -> bool:
        """Return whether the norms of the unit's gradients of this boundary are here."""
        return unit.index in self._norms

    def step(
        self, units: Iterable[Unit], norm: Tensor, shards_of: Callable[[Unit], Iterable[ParamSlice]]
    ) -> Iterator[Unit]:
        """Queue the updates of this boundary, and settle the updates that were computed before the norm.

        Yields the units that are updated. A unit without a gradient, which all ranks agree on, is left out.
        """
        read = self._context.device.read_async(norm)
        factor = ClipFromNorm(lambda: float(read.get()), read.event, self._scale.value, self._clip)
        for unit in units:
            if self.host.is_queued(unit):
                self.host.settle(unit, factor, hyperparameters_of(self._inner))
                yield unit
            elif any(g.is_stepped_on_host and g.gradients.result is not None for g in unit.trainable):
                self.host.descent.bring_down(unit, waits=True)  # gradients that no micro-step added to at the boundary
                self.host.start(unit, list(shards_of(unit)), hyperparameters_of(self._inner), factor)
                yield unit

    def give_up(self, unit: Unit) -> HostPending | None:
        """Note that this boundary has no step: speculative updates are not applied."""
        self.host.give_up(unit)
        return self.host.arrival(unit)

    def forget_gradients(self) -> None:
        """Drop the gradients and norms of this boundary."""
        self._norms.clear()
        self.host.forget_gradients()

    # ------------------------------------------------------------------------------------------------ placement

    def leave(self, unit: Unit) -> None:
        """Forget a unit, and free what was kept for its updates."""
        self.host.forget_guesses()
        self.host.drop_shadow(unit)
        for group in unit.trainable:
            self.host.descent.leave(group)

    @torch.no_grad()
    def move_up(self, unit: Unit, scalar: Callable[[Tensor, Any, float], Any]) -> None:
        """Store a unit's optimizer state on the device from now on. `scalar` makes a scalar entry of the state."""
        unit.wait()
        self.host.forget_guesses()  # units on the device need none
        where = self._context.device.torch_device
        if self.host.store is not None:
            self.host.store.empty(unit)
        for group in [group for group in unit.trainable if group.is_stepped_on_host]:
            self.host.descent.leave(group)
            group.move_masters_up()
            for shard in self._shards.of(unit):
                if shard.group is group:
                    state = self._inner.state.get(shard.tensor, {})
                    for key, value in state.items():
                        is_number = isinstance(value, Tensor) and value.ndim == 0
                        state[key] = scalar(shard.tensor, value, float(value)) if is_number else _on(where, value)
        self.host.drop_shadow(unit)

    def bytes_above(self, unit: Unit) -> int:
        """Return the bytes that a unit needs on the device: master weights, moments, and gradients that wait."""
        groups = [group for group in unit.trainable if group.is_stepped_on_host]
        per_element = 4 * (1 + len(self.host.kernel.keys))
        return sum((g.own[1] - g.own[0]) * (per_element + g.precision.compute.itemsize) for g in groups)


def _on(where: torch.device, value: Any) -> Any:
    """Return an entry of a state on a device."""
    if isinstance(value, Moment8bit):
        return value[:].to(where)
    return value.to(where) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class ClipFromNorm:
    """A gradient factor that unscales, and clips if there is a bound. Its value is None if the norm is not finite."""

    norm: Callable[[], float]
    known: Event
    scale: float
    clip: float = 0.0

    def __call__(self) -> float | None:
        known = self.norm()
        if not math.isfinite(known):
            return None
        clipped = min(self.clip / (known / self.scale + 1e-6), 1.0) if self.clip > 0 else 1.0
        return clipped / self.scale
