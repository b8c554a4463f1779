"""What the codes of a group's gradients did not say, to be said the next time.

It is kept twice, as it is and as it was when the step began: a step that is left out has said nothing. Both in bf16,
which a few thousandths of a code's step are lost in. Gradients travel multiplied by a loss scale, or before they are
averaged: what was lost is multiplied alike before it joins them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwell.memory import StateKind, TemporaryBuffers


class QuantizationResidual:
    def __init__(self, numel: int, unit: str, scratch: TemporaryBuffers) -> None:
        self._scratch = scratch
        self._both = scratch.allocate(2 * numel, torch.bfloat16, StateKind.GRADIENTS, unit).zero_()
        self._now, self._before = self._both.chunk(2) if numel else (self._both, self._both)
        self._factor = 1.0  # that makes gradients of it
        self._has_begun = False

    def joining(self, factor: float) -> Tensor:
        """What to say (1D) with numbers that `factor` makes gradients of; whoever does leaves what he could not."""
        if factor != self._factor:
            self._both.mul_(self._factor / factor)
            self._factor = factor
        if not self._has_begun:
            self._before.copy_(self._now)
            self._has_begun = True
        return self._now

    def end_step(self, was_used: bool | Tensor) -> None:
        """What was said since the last step was heard, or not; a tensor says so on the device."""
        if self._has_begun and was_used is not True:
            heard = was_used if isinstance(was_used, Tensor) else self._now.new_zeros((), dtype=torch.bool)
            torch.where(heard, self._now, self._before, out=self._now)
        self._has_begun = False

    def free(self) -> None:
        self._scratch.free(self._both)
