"""The loss scale that gradients carry between models.

Gradients carry a loss scale: that of the engine whose `backward` was called, or none after a plain `loss.backward()`.
Where they enter an engine's model they get its own scale, and where they leave it they go on as they came. Aliases do
that, because what goes on inside the model (a loss of logits that are returned too) must not meet the factor twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from torch import Tensor

from shardwell.optim.loss_scale import LossScale
from shardwell.runtime.pytree import alias_with

_carried = SimpleNamespace(scale=1.0)  # that of the running backward's gradients outside of models


@contextlib.contextmanager
def carrying(scale: LossScale) -> Iterator[None]:
    """The backward that runs inside begins with this scale."""
    before, _carried.scale = _carried.scale, scale.value
    try:
        yield
    finally:
        _carried.scale = before


def scaled_output(tensor: Tensor, scale: LossScale, met: Callable[[], None]) -> Tensor:
    """An output whose gradient gets the model's scale, and tells that it did."""
    if not tensor.requires_grad:
        return tensor

    def enter(grad: Tensor) -> Tensor:
        met()
        return grad if _carried.scale == scale.value else grad * (scale.value / _carried.scale)

    return alias_with(tensor, enter)


def unscaled_input(tensor: Tensor, scale: LossScale) -> Tensor:
    """An input whose gradient goes on without the model's scale."""
    if not tensor.requires_grad:
        return tensor
    is_last = tensor.is_leaf  # nobody behind it would take the scale off

    def leave(grad: Tensor) -> Tensor:
        return grad * ((1.0 if is_last else _carried.scale) / scale.value)

    return alias_with(tensor, leave)
