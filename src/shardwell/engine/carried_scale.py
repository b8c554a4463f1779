"""The precision of a model's passes, and the loss scale of gradients that flow between models.

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

from shardwell.config import Config
from shardwell.optim.loss_scale import LossScale
from shardwell.runtime.precision import autocast_of, loss_scale_of, mixed_dtype
from shardwell.runtime.pytree import alias_with, map_tensors, mover

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


class ModelPrecision:
    """The settings of one model's passes: the device and dtype of its inputs, autocast, and the loss scale."""

    def __init__(self, config: Config, device: torch.device, met: Callable[[], None]) -> None:
        """Read the configuration; `met` is called when gradients get the model's loss scale."""
        self.loss_scale = loss_scale_of(config)
        self.border = ModelScale(self.loss_scale, met) if self.loss_scale.is_on else None
        self.use_config(config, device)

    def use_config(self, config: Config, device: torch.device) -> None:
        """Move inputs and autocast as this configuration says; the loss scale stays."""
        self.autocast = autocast_of(config, device)  # makes a context
        move = mover(device, mixed_dtype(config))
        self.move_input = move if self.border is None else self.border.on_input(move)


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
