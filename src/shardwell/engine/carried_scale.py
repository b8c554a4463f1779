"""The loss scale of gradients that flow between models.

Gradients have a loss scale: that of the engine whose `backward` was called, or none after a plain `loss.backward()`.
Where gradients enter an engine's model they get the engine's scale, and where they leave it they get the scale that
they had before. Aliases of the tensors do this, because uses inside the model (a loss of logits that are returned too)
must not get the factor twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shardwell.optim.loss_scale import LossScale
from shardwell.runtime.pytree import alias_with, map_tensors

CARRIED = SimpleNamespace(scale=1.0)  # of the gradients of the running backward outside of models


@contextlib.contextmanager
def carrying(scale: LossScale) -> Iterator[None]:
    """Return a context in which backward begins with this scale."""
    before, CARRIED.scale = CARRIED.scale, scale.value
    try:
        yield
    finally:
        CARRIED.scale = before


class ModelScale:
    """The loss scale at the borders of one model."""

    def __init__(self, scale: LossScale, met: Callable[[], None]) -> None:
        """Scale gradients at a model's borders; `met` is called when some get the model's scale."""
        self._scale, self._met = scale, met

    def on_input(self, move: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return `move`, a function of an input, such that gradients leave it without the model's scale."""

        def change(tensor: Tensor) -> Tensor:
            return move(_unscaled_input(tensor, self._scale) if torch.is_grad_enabled() else tensor)

        return change

    def on_output(self, output: Any) -> Any:
        """Return the same nested output, whose gradients get the model's scale."""
        if not torch.is_grad_enabled():
            return output
        return map_tensors(output, partial(_scaled_output, scale=self._scale, met=self._met))


def _scaled_output(tensor: Tensor, scale: LossScale, met: Callable[[], None]) -> Tensor:
    """Return an output whose gradient gets the model's scale, and calls `met` when it does."""
    if not tensor.requires_grad:
        return tensor

    def enter(grad: Tensor) -> Tensor:
        met()
        return grad if CARRIED.scale == scale.value else grad * (scale.value / CARRIED.scale)

    return alias_with(tensor, enter)


def _unscaled_input(tensor: Tensor, scale: LossScale) -> Tensor:
    """Return an input whose gradient leaves without the model's scale."""
    if not tensor.requires_grad:
        return tensor
    is_last = tensor.is_leaf  # no later node would remove the scale

    def leave(grad: Tensor) -> Tensor:
        return grad * ((1.0 if is_last else CARRIED.scale) / scale.value)

    return alias_with(tensor, leave)
