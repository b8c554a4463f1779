"""Norms of gradients, on this rank and over all ranks, and the report on a step whose norm is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell.memory import Device
from shardwell.optim.learning_rates import LearningRateCheck
from shardwell.optim.param_slices import ParamSlice, ParamSlices
from shardwell.sharding import EngineContext, Unit
from shardwell.sharding.spec import CommitPolicy

Norm = Tensor | Callable[[], float]  # or a function that waits for it

_MOST_NAMES = 8  # unit names in a message


def norm_of(shard: ParamSlice) -> tuple[Tensor, bool]:
    """Return the norm of a slice's gradient, and whether every rank has the same gradient."""
    gradient = shard.gradient
    assert gradient is not None
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dtype=wide), shard.group.row.gradients.axis is None


def sum_of_squares(norms: list[Tensor], device: Device) -> Tensor:
    """Return the sum of the squares of these norms, in fp64 on the device."""
    if not norms:
        return device.scalar(0.0, torch.float64)
    return torch.stack([norm.double() for norm in norms]).square().sum()


def clip_factor(norm: Tensor, clip: float) -> Tensor | None:
    """Return the factor for the gradients; None if the host knows without waiting that nothing is clipped."""
    if clip <= 0:
        return None
    factor = (clip / (norm + 1e-6)).clamp(max=1.0)
    return None if factor.device.type == "cpu" and float(factor) == 1.0 else factor


class GradNorm:
    """The norm of the gradients over all ranks.

    The same all-reduce finds the parameters that got a gradient on no rank, and checks that all ranks step with the
    same hyperparameters.
    """

    def __init__(self, context: EngineContext, shards: ParamSlices, optimizer: Optimizer) -> None:
        self._context, self._shards = context, shards
        self._rates = LearningRateCheck(context, optimizer)
        self.unseen: set[str] = set()  # names of parameters without a gradient on any rank, at the last call
        self._all_seen: Tensor | None = None
        self.told: Tensor | None = None  # the sum of the ranks' `says`

    def __call__(
        self,
        units: Sequence[Unit],
        norms_of: Callable[[Unit], Iterator[tuple[Tensor, bool]]],
        says: float | None = None,
    ) -> Tensor:
        """Return the global norm; all ranks must call it.

        `norms_of` yields the norms of a unit's gradients on this rank, see `norm_of`. `says` is a number that is summed
        over the ranks in the same all-reduce.
        """
        split: list[Tensor] = []
        whole: list[Tensor] = []
        for unit in units:
            for norm, is_whole in norms_of(unit):
                (whole if is_whole else split).append(norm)
        seen = self._shards.seen()
        self._rates.hear()
        parts = [sum_of_squares(split, self._context.device).view(1), self._flags(seen), *self._rates.says()]
        if says is not None:
            parts.append(self._context.device.scalar(says, torch.float64).view(1))
        total = torch.cat(parts)
        self._context.world.all_reduce_sum(total, "NORM")
        self._rates.ask(total, 1 + len(seen))
        self.told = None if says is None else total[-1]
        self.unseen = set()
        if not all(seen) and not self._context.device.is_meta:
            anywhere = total[1:].tolist()
            self.unseen = {name for name, number in self._shards.numbers.items() if not anywhere[number]}
        return (total[0] + sum_of_squares(whole, self._context.device)).sqrt()

    def _flags(self, seen: list[bool]) -> Tensor:
        """Return a number for each parameter (1D): whether it got a gradient on this rank."""
        device = self._context.device.torch_device
        if not all(seen):
            return torch.tensor(seen, dtype=torch.float64, device=device)
        if self._all_seen is None or len(self._all_seen) != len(seen):
            self._all_seen = torch.ones(len(seen), dtype=torch.float64, device=device)
        return self._all_seen


class PartialUpdateReport:
    """A report on a step whose norm is not finite: which units were updated immediately, fully or in part.

    A rank updates its part of a unit if its own part of the gradients is finite. The parts of other ranks may not be.
    """

    def __init__(self, context: EngineContext, shards: ParamSlices) -> None:
        self._context, self._shards = context, shards
        self._noted: list[tuple[str, list[list[Norm] | None]]] = []  # by unit: see `note`, for each slice

    def note(self, units: Sequence[Unit], norms_at_once: Callable[[Unit, ParamSlice], list[Norm] | None]) -> None:
        """Record the start of a step: a slice was updated immediately if its norms are finite; None: it waits."""
        commits = {group.row.commit for unit in units for group in unit.trainable}
        self._noted = [
            (unit.name or "(root)", [norms_at_once(unit, s) for s in self._shards.of(unit) if s.label >= 0])
            for unit in (units if CommitPolicy.IMMEDIATE in commits else ())
        ]

    def __call__(self, *, is_late: bool) -> tuple[bool, str]:
        """Return whether all values are as before the step, and a sentence that says so.

        If anything may have been updated, all ranks must call it. `is_late`: a backward may have updated more since
        then.
        """
        names: dict[tuple[bool, bool], list[str]] = {}
        for (name, _), left, updated in zip(self._noted, *self._counts(), strict=True):
            names.setdefault((left > 0, updated > 0), []).append(name)
        ways = {(False, True): "updated", (True, True): "updated in part", (True, False): "as before"}
        if not any(updated for _, updated in names) and not (names and is_late):
            return True, "the step was not applied and parameters and optimizer state are as before"
        said = "; ".join(f"{way}: {_listed(names[key])}" for key, way in ways.items() if key in names)
        more = ", nor are those of backwards since then" if is_late else ""
        return False, f"updates at once are not taken back ({said}){more}"

    def _counts(self) -> tuple[list[float], list[float]]:
        """Return for each unit the slices that are as before, and those that were updated, over all ranks."""
        counts = torch.zeros(2, len(self._noted), dtype=torch.float64, device="cpu")
        for number, (_, shards) in enumerate(self._noted):
            for norms in shards:
                is_updated = norms is not None and all(math.isfinite(_known(norm)) for norm in norms)
                counts[int(is_updated), number] += 1
        counts = counts.to(self._context.device.torch_device)
        if self._noted:
            self._context.world.all_reduce_sum(counts, "AFTERMATH")
        left, updated = counts.tolist()
        return left, updated


def _known(norm: Norm) -> float:
    return float(norm if isinstance(norm, Tensor) else norm())


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more units"
