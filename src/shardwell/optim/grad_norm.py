"""The norm of a step: the all-reduce that finds it, and the check whether it is finite.

The same all-reduce finds the parameters that got a gradient on no rank, and carries numbers by which ranks compare
something: above all a checksum of the hyperparameters that they step with.
"""

from __future__ import annotations

import logging
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell.errors import DivergenceError, NonFiniteError
from shardwell.memory import Device
from shardwell.memory.device import AsyncScalar
from shardwell.optim.loss_scale import LossScale
from shardwell.optim.param_slices import ParamSlice, ParamSlices
from shardwell.parallel.consistency import check_alike
from shardwell.sharding import EngineContext

FIRST_STEPS = 10  # steps in which gradients that are not finite mean that the run is broken from the start
MOST_IN_A_ROW = 50  # consecutive skipped steps before a run is taken for broken
# options of parameter groups that say how a step is computed, not what its result is
_NOT_COMPARED = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


# ---------------------------------------------------------------------------------------------------------- norms


def norm_of(shard: ParamSlice) -> tuple[Tensor, bool]:
    """Return the norm (fp64) of a slice's gradient, which exists, and whether every rank has the same gradient.

    If only the ranks of the group's data axis have the same, as in a grid of ranks, each brings its share of the norm.
    """
    gradients = shard.group.gradients
    assert gradients.reduced.tensor is not None
    gradient = gradients.reduced.tensor[shard.span]
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norm = torch.linalg.vector_norm(gradient, dtype=wide).double()
    if shard.group.tied is not None:
        norm = norm / math.sqrt(shard.group.tied.size)  # other pipeline stages have the same
    is_replicated, roles = shard.group.spec.gradients.axis is None, shard.group.context.roles
    if is_replicated and roles.grid.has_model_axes:
        return norm / math.sqrt(roles.data.rank_group.size // roles.grid.replicate), False
    return norm, is_replicated


def sum_of_squares(norms: list[Tensor], device: Device) -> Tensor:
    """Return the sum of the squares of these norms (fp64), on the device."""
    return torch.stack(norms).square().sum() if norms else device.scalar(0.0, torch.float64)


def clip_factor(norm: Tensor, clip: float) -> Tensor | None:
    """Return the factor for the gradients; None if the host knows without waiting that nothing is clipped."""
    if clip <= 0:
        return None
    factor = (clip / (norm + 1e-6)).clamp(max=1.0)
    return None if factor.device.type == "cpu" and float(factor) == 1.0 else factor


class SummedNumber(Protocol):
    """A number of each rank that is summed over the ranks in the all-reduce of the norm."""

    spans_stages: bool  # it is summed over the stages of a pipeline, too, as the norm is

    def append_to(self, parts: list[Tensor]) -> None:
        """Append this rank's number: 1D, fp64, on the device."""

    def take_sum(self, total: Tensor) -> None:
        """Take the sum over the ranks, on the device."""


class GradNorm:
    """The norm of the gradients over all ranks, found by one all-reduce, and the factor that clips them."""

    last: Tensor | None = None  # the norm of the last step, without the loss scale

    def __init__(
        self, context: EngineContext, slices: ParamSlices, summed: Sequence[SummedNumber], clip: float
    ) -> None:
        self._context, self._slices, self.summed = context, slices, summed
        self._in_stage = [one for one in summed if not one.spans_stages]
        self.sum_also(())
        self.clip = clip  # the largest norm of the gradients; 0: no clipping
        self._counts = context.roles.is_first_replica  # this rank's shards count: replicas have the same
        self.unseen: set[str] = set()  # names of parameters without a gradient on any rank, at the last call
        self._all_seen: Tensor | None = None

    def sum_also(self, numbers: Sequence[SummedNumber]) -> None:
        """Sum these numbers, which span the stages of a pipeline, besides those that were given at first."""
        self._over_stages = [*(one for one in self.summed if one.spans_stages), *numbers]

    def __call__(self, norms: Iterable[tuple[Tensor, bool]]) -> Tensor:
        """Return the global norm; all ranks must call it.

        `norms` are those of this rank's gradients (fp64), each with whether every rank has the same gradient.
        """
        device = self._context.device
        sharded: list[Tensor] = []
        replicated: list[Tensor] = []
        for norm, is_replicated in norms:
            (replicated if is_replicated else sharded).append(norm)
        seen: list[bool] = []  # by the number of the parameter: this rank has a gradient of it
        for group in self._slices.groups:
            seen += group.gradients.has_gradient
        if (blocks := device.machine.blocks) is not None:  # as many flags as the whole model has
            seen += [True] * (blocks.on_all((name, 1) for name in self._slices.numbers) - len(seen))
        if not all(seen):
            flags = torch.tensor(seen, dtype=torch.float64, device=device.torch_device)
        elif self._all_seen is not None and len(self._all_seen) == len(seen):
            flags = self._all_seen
        else:
            flags = self._all_seen = torch.ones(len(seen), dtype=torch.float64, device=device.torch_device)
        parts = [sum_of_squares(sharded if self._counts else [], device).view(1)]
        for one in self._over_stages:
            one.append_to(parts)
        first = len(parts)
        parts.append(flags)
        for one in self._in_stage:
            one.append_to(parts)
        total = torch.cat(parts)
        self._context.roles.stage.all_reduce_sum(total, "NORM")
        if (pipe := self._context.roles.pipe) is not None:
            pipe.all_reduce_sum(total[:first], "NORM")
        for place, one in enumerate(self._over_stages, start=1):
            one.take_sum(total[place])
        for place, one in enumerate(self._in_stage, start=first + len(seen)):
            one.take_sum(total[place])
        self.unseen = set()
        if not all(seen) and not device.is_meta:
            anywhere = total[first:].tolist()
            self.unseen = {name for name, number in self._slices.numbers.items() if not anywhere[number]}
        return (total[0] + sum_of_squares(replicated, device) if replicated else total[0]).sqrt()


# ------------------------------------------------------------------------------------------------ hyperparameters


class HyperparameterCheck:
    """The check whether all ranks step with the same hyperparameters.

    Each rank adds a checksum of its own to the sum over the ranks. If all checksums are equal, the sum is the checksum
    times the number of ranks; if not, every rank finds a difference. The sum on a GPU is read at the next step, so that
    no rank waits for it.
    """

    spans_stages = True

    def __init__(self, context: EngineContext, optimizer: Optimizer) -> None:
        self._context, self._optimizer = context, optimizer
        self._reads_later = context.device.has_streams
        self._names: dict[tuple[str, ...], list[str]] = {}  # the options that are compared, by those of a group
        self._checksum = -1.0
        self._on_device: Tensor | None = None  # the checksum
        self._later: tuple[AsyncScalar, float] | None = None  # the sum of the last step, and the checksum then

    def append_to(self, parts: list[Tensor]) -> None:
        """Append the checksum; if the ranks' differed at the last step, raise an error on all ranks."""
        if self._later is not None:
            (later, checksum), self._later = self._later, None
            if float(later.get()) != checksum * self._context.roles.all.rank_group.size:
                self._raise_difference()
        numbers: list[float] = []
        for group in self._optimizer.param_groups:
            if (names := self._names.get(keys := tuple(group))) is None:
                names = self._names[keys] = _compared(group)
            for name in names:
                value = group[name]
                if type(value) is float:
                    numbers.append(value)
                elif type(value) is tuple and tuple(map(type, value)) == (float, float):
                    numbers += value
                elif value is not None:
                    numbers += _numbers(value)
        checksum = float(zlib.crc32(struct.pack(f"{len(numbers)}d", *numbers)))
        if self._on_device is None or checksum != self._checksum:
            self._checksum = checksum
            self._on_device = self._context.device.scalar(checksum, torch.float64).view(1)
        parts.append(self._on_device)

    def take_sum(self, total: Tensor) -> None:
        """Take the sum; where the host need not wait for it, it is compared now."""
        if self._reads_later:
            self._later = self._context.device.read_async(total), self._checksum
        elif not total.is_meta and total.item() != self._checksum * self._context.roles.all.rank_group.size:
            self._raise_difference()

    def _raise_difference(self) -> NoReturn:
        self._context.roles.agreement.check_peers()
        # This raises, unless they are alike again.
        check_alike(self._context.roles.all, "step", {"optimizer's": self._words()})
        raise DivergenceError("ranks took the last step with different learning rates. Set the same on all of them.")

    def _words(self) -> dict[str, str]:
        several = len(self._optimizer.param_groups) > 1
        return {
            f"{name}{f' of parameter group {number}' if several else ''}": repr(_numbers(group[name]))[1:-1]
            for number, group in enumerate(self._optimizer.param_groups)
            for name in _compared(group)
        }


def hyperparameter_checks(context: EngineContext, optimizer: Optimizer) -> list[HyperparameterCheck]:
    """Return the check of an optimizer, if there are other ranks: real ones, or those of a simulated machine."""
    agreement, ranks = context.roles.agreement, context.roles.all.rank_group
    is_on = (agreement is not None and agreement.store is not None) or (ranks.is_simulated and ranks.size > 1)
    return [HyperparameterCheck(context, optimizer)] if is_on else []


def _compared(group: Mapping[str, Any]) -> list[str]:
    """Return the options of a parameter group that all ranks must have alike, the learning rate first."""
    return sorted(group.keys() - _NOT_COMPARED, key=lambda name: (name != "lr", name))


def check_finite_options(optimizer: Optimizer, what_was_done: Callable[[], str]) -> None:
    """Raise if a learning rate or another option is not finite, of which the optimizer's default is.

    Only Python's numbers are looked at, so that the host waits for no device. `what_was_done` says what the step has
    updated so far.
    """
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            for one in value if type(value) is tuple else (value,):
                if type(one) is float and one - one != 0.0 and (name == "lr" or _has_finite_default(optimizer, name)):
                    words = "the learning rate (lr)" if name == "lr" else name
                    raise NonFiniteError(
                        f"{words} of parameter group {number} is {value}, with which the {type(optimizer).__name__} "
                        f"would ruin the model; {what_was_done()}. Check the learning-rate schedule, and what else "
                        "sets options of parameter groups."
                    )


def _has_finite_default(optimizer: Optimizer, name: str) -> bool:
    default = optimizer.defaults.get(name)
    return all(map(math.isfinite, _numbers(default)))


def _numbers(value: Any) -> list[float]:
    """Return the numbers that are known without waiting for a GPU."""
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    if isinstance(value, Tensor):
        return [float(value)] if value.numel() == 1 and value.device.type == "cpu" else []
    return [float(value)] if isinstance(value, int | float) else []


# ----------------------------------------------------------------------------------------------------- overflow


class NonfiniteNorm(Enum):
    """The treatment of a step whose gradients are not finite, without a loss scale."""

    AUTO = "auto"  # an error in the first steps and after many in a row, else skipped
    ERROR = "error"
    SKIP = "skip"


class OverflowCheck:
    """The check of each step whether its norm is finite. The result is read in that step or in the next one.

    These are fixed places in the program, so that all ranks act on the result alike.
    """

    def __init__(
        self,
        context: EngineContext,
        slices: ParamSlices,
        scale: LossScale,
        describe_partial: Callable[..., tuple[bool, str]],
        *,
        policy: NonfiniteNorm,
    ) -> None:
        """Set up the check; `policy` applies to steps that are not finite, which a loss scale always skips.

        `describe_partial` is `UpdateExecutor.describe_partial`.
        """
        self._device, self._agreement = context.device, context.roles.agreement
        self._is_first_rank = context.roles.all.rank_group.rank == 0
        self._slices, self._scale, self._policy = slices, scale, policy
        self._describe_partial = describe_partial
        self.pending: AsyncScalar | None = None  # a norm that the host has not read yet
        self._in_a_row = 0  # steps that were not finite
        self.overflow = False  # the last step was not finite
        self.num_resolved = 0  # steps of the run, including those before it was resumed
        self.num_skipped = 0

    def enqueue(self, norm: Tensor) -> None:
        """Start to read the norm."""
        if not norm.is_meta:
            self.pending = self._device.read_async(norm)

    def resolve(self, *, is_late: bool = True) -> bool:
        """Wait for the norm of the last `enqueue`; if it is not finite, raise an error or count a skipped step."""
        if self.pending is None:
            return True
        norm, self.pending = float(self.pending.get()), None
        self.num_resolved += 1
        self.overflow = not math.isfinite(norm)
        if not self.overflow:
            self._in_a_row = 0
            return True
        self._agreement.check_peers()
        self.num_skipped += 1
        self._in_a_row += 1
        if self._policy is not NonfiniteNorm.SKIP and not self._scale.is_on:
            self._raise_unless_skipped(norm, is_late=is_late)
        self._warn(norm, is_late=is_late)
        return False

    def _raise_unless_skipped(self, norm: float, *, is_late: bool) -> None:
        """Raise an error unless the step is skipped.

        The decision is the same on all ranks, because the norm, the counts and the report on partial updates are.
        """
        is_as_before, state = self._describe_partial(is_late=is_late)
        reason = self._reason(is_as_before)
        if reason is not None:
            raise NonFiniteError(
                f"the gradients are not finite (their global norm is {norm})"
                f"{', at the last step' if is_late else self._first()}; {state}. {reason}Check the loss and the "
                'learning rate, or set "shardwell": {"nonfinite": "skip"} to leave such steps out.'
            )

    def _reason(self, is_as_before: bool) -> str | None:
        """Return why the step is an error; None if it is skipped."""
        if self._policy is NonfiniteNorm.ERROR:
            return ""
        if self.num_resolved <= FIRST_STEPS:
            return f"It is one of the first {FIRST_STEPS} steps; later ones would be left out. "
        if not is_as_before:
            return "A step that was applied in part cannot be left out. "
        if self._in_a_row >= MOST_IN_A_ROW:
            return f"{self._in_a_row} steps were left out one after another: the run does not recover by itself. "
        return None

    def _warn(self, norm: float, *, is_late: bool) -> None:
        """Warn that a step was skipped, less often the more there are; overflows of a loss scale are expected."""
        count = self._in_a_row if self._scale.is_on else self.num_skipped
        every = MOST_IN_A_ROW if self._scale.is_on else 10 ** max(0, len(str(count)) - 2)
        if self._is_first_rank and count % every == 0:
            logging.getLogger("shardwell").warning(
                "step %d was left out: the gradients are not finite (their global norm is %s%s). %d of %d steps were "
                "left out so far, %d of them in a row.",
                self.num_resolved,
                norm,
                "" if is_late else self._first(),
                self.num_skipped,
                self.num_resolved,
                self._in_a_row,
            )

    def _first(self) -> str:
        for shard in (shard for unit in self._slices.units for shard in self._slices.of(unit)):
            if shard.gradient is not None and not bool(torch.isfinite(shard.gradient).all()):
                return f", first in unit '{shard.group.unit or '(root)'}'"
        return ""
