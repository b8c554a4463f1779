"""Whether a step counts: its norm is finite. Where kernels can be told on the device, the host hears of it later."""

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

FIRST_STEPS = 10  # in which gradients that are not finite mean that something is broken from the start
MOST_IN_A_ROW = 50  # steps left out one after another before a run is taken for broken


class NonfiniteNorm(Enum):
    """What becomes of a step whose gradients are not finite, where losses are not scaled."""

    AUTO = "auto"  # an error in the first steps and after many in a row; left out otherwise
    ERROR = "error"
    SKIP = "skip"


class OverflowCheck:
    """Asked for at each step, and heard there or at the next one: fixed places, so that all ranks act on it alike."""

    def __init__(self, context: EngineContext, shards: ParamSlices, scale: LossScale, *, policy: NonfiniteNorm) -> None:
        """`policy`: what becomes of a step that does not count. Where losses are scaled it is left out."""
        self._device, self._is_first_rank = context.device, context.world.mesh.rank == 0
        self._shards, self._scale, self._policy = shards, scale, policy
        self._aftermath = PartialUpdateReport(context, shards)
        self._units: Sequence[Unit] = ()
        self._norm: AsyncScalar | None = None
        self._in_a_row = 0  # steps that did not count
        self.overflow = False  # the last one did not count
        self.num_heard = 0  # steps of the run, with those before it was resumed
        self.num_skipped = 0

    @property
    def is_open(self) -> bool:
        """It was asked for, and nobody has heard it yet."""
        return self._norm is not None

    def ask(
        self, units: Sequence[Unit], norm: Tensor, norms_at_once: Callable[[Unit, ParamSlice], list[Norm] | None]
    ) -> None:
        """Begin to read the norm; see `PartialUpdateReport.note` for what was updated at once."""
        self._units = units
        self._aftermath.note(units, norms_at_once)
        if not self._device.is_meta:
            self._norm = self._device.read_async(norm)

    def hear(self, *, is_late: bool = True) -> bool:
        """Learn whether the norm that was last asked about is finite; raises or counts a skipped step if not."""
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
        """What is decided here is alike on all ranks: the norm, the counts, and the aftermath are."""
        is_as_before, state = self._aftermath(is_late=is_late)
        reason = self._reason(is_as_before)
        if reason is not None:
            raise NonFiniteError(
                f"the gradients are not finite (their global norm is {norm})"
                f"{', at the last step' if is_late else self._first()}; {state}. {reason}Check the loss and the "
                'learning rate, or set "shardwell": {"nonfinite": "skip"} to leave such steps out.'
            )

    def _reason(self, is_as_before: bool) -> str | None:
        """Why it is an error; None if the step is left out."""
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
        """Say that a step was left out, the more seldom the more there were. Overflows of a loss scale are its own."""
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
