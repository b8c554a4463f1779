"""Error feedback: the quantisation error of a group's gradients, which is added to the next gradients.

The error is kept twice, as it is now and as it was when the step began, because the gradients of a skipped step were
never applied. Both copies are in bf16, which loses a few thousandths of a quantisation step. Gradients are sent
multiplied by a loss scale, or before they are averaged: the error is multiplied by the same factor before it is added
to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwell.memory import StateKind, TemporaryBuffers


class QuantizationResidual:
    """The quantisation error of one group's gradients."""

    def __init__(self, numel: int, unit: str, temporary: TemporaryBuffers) -> None:
        self._temporary = temporary
        self._both = temporary.allocate(2 * numel, torch.bfloat16, StateKind.GRADIENTS, unit).zero_()
        self._now, self._before = self._both.chunk(2) if numel else (self._both, self._both)
        self._factor = 1.0  # converts the error to gradients
        self._has_begun = False

    def scaled_to(self, factor: float) -> Tensor:
        """Return the error (1D) to add to values that `factor` converts to gradients.

        The caller overwrites it with the new error.
        """
        if factor != self._factor:
            self._both.mul_(self._factor / factor)
            self._factor = factor
        if not self._has_begun:
            self._before.copy_(self._now)
            self._has_begun = True
        return self._now

    def end_step(self, was_used: bool | Tensor) -> None:
        """Keep the error of a step whose gradients were applied, else restore the earlier one.

        `was_used` may be a tensor on the device.
        """
        if self._has_begun and was_used is not True:
            is_used = was_used if isinstance(was_used, Tensor) else self._now.new_zeros((), dtype=torch.bool)
            torch.where(is_used, self._now, self._before, out=self._now)
        self._has_begun = False

    def free(self) -> None:
        """Free both copies."""
        self._temporary.free(self._both)
