"""The check whether the norm of a step is finite; where kernels read it on the device, the host reads it later."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor

from shardwell.errors import NonFiniteError
from shardwell.memory.device import AsyncScalar
from shardwell.optim.grad_norm import Norm, PartialUpdateReport
from shardwell.optim.loss_scale import LossScale
from shardwell.optim.param_slices import ParamSlice, ParamSlices
from shardwell.sharding import EngineContext, Unit

FIRST_STEPS = 10  # steps in which gradients that are not finite mean that the run is broken from the start
MOST_IN_A_ROW = 50  # consecutive skipped steps before a run is taken for broken


class NonfiniteNorm(Enum):
    """The treatment of a step whose gradients are not finite, without a loss scale."""

    AUTO = "auto"  # an error in the first steps and after many in a row, else skipped
    ERROR = "error"
    SKIP = "skip"


class OverflowCheck:
    """The check of each step, whose result is read in that step or in the next one.

    These are fixed places in the program, so that all ranks act on the result alike.
    """

    def __init__(self, context: EngineContext, shards: ParamSlices, scale: LossScale, *, policy: NonfiniteNorm) -> None:
        """Set up the check; `policy` applies to steps that are not finite, which a loss scale always skips."""
        self._device, self._is_first_rank = context.device, context.world.mesh.rank == 0
        self._shards, self._scale, self._policy = shards, scale, policy
        self._aftermath = PartialUpdateReport(context, shards)
        self._units: Sequence[Unit] = ()
        self._norm: AsyncScalar | None = None
        self._in_a_row = 0  # steps that were not finite
        self.overflow = False  # the last step was not finite
        self.num_heard = 0  # steps of the run, including those before it was resumed
        self.num_skipped = 0

    @property
    def is_open(self) -> bool:
        """Whether a result is in flight and has not been read yet."""
        return self._norm is not None

    def ask(
        self, units: Sequence[Unit], norm: Tensor, norms_at_once: Callable[[Unit, ParamSlice], list[Norm] | None]
    ) -> None:
        """Start to read the norm; see `PartialUpdateReport.note` for immediate updates."""
        self._units = units
        self._aftermath.note(units, norms_at_once)
        if not self._device.is_meta:
            self._norm = self._device.read_async(norm)

    def hear(self, *, is_late: bool = True) -> bool:
        """Wait for the norm of the last `ask`; if it is not finite, raise an error or count a skipped step."""
        if self._norm is None:
            return True
        norm, self._norm = float(self._norm.get()), None
        self.num_heard += 1
        self.overflow = not math.isfinite(norm)
        if not self.overflow:
            self._in_a_row = 0
            return True
        self.num_skipped += 1
        self._in_a_row += 1
        if self._policy is not NonfiniteNorm.SKIP and not self._scale.is_on:
            self._raise_unless_skipped(norm, is_late=is_late)
        self._tell(norm, is_late=is_late)
        return False

    def _raise_unless_skipped(self, norm: float, *, is_late: bool) -> None:
        """Raise an error unless the step is skipped.

        The decision is the same on all ranks, because the norm, the counts and the report on partial updates are.
        """
        is_as_before, state = self._aftermath(is_late=is_late)
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
        if self.num_heard <= FIRST_STEPS:
            return f"It is one of the first {FIRST_STEPS} steps; later ones would be left out. "
        if not is_as_before:
            return "A step that was applied in part cannot be left out. "
        if self._in_a_row >= MOST_IN_A_ROW:
            return f"{self._in_a_row} steps were left out one after another: the run does not recover by itself. "
        return None

    def _tell(self, norm: float, *, is_late: bool) -> None:
        """Warn that a step was skipped, less often the more there are; overflows of a loss scale are expected."""
        count = self._in_a_row if self._scale.is_on else self.num_skipped
        every = MOST_IN_A_ROW if self._scale.is_on else 10 ** max(0, len(str(count)) - 2)
        if self._is_first_rank and count % every == 0:
            logging.getLogger("shardwell").warning(
                "step %d was left out: the gradients are not finite (their global norm is %s%s). %d of %d steps were "
                "left out so far, %d of them in a row.",
                self.num_heard,
                norm,
                "" if is_late else self._first(),
                self.num_skipped,
                self.num_heard,
                self._in_a_row,
            )

    def _first(self) -> str:
        for shard in (shard for unit in self._units for shard in self._shards.of(unit)):
            if shard.gradient is not None and not bool(torch.isfinite(shard.gradient).all()):
                return f", first in unit '{shard.group.unit or '(root)'}'"
        return ""
