"""The loss scale of gradients that flow between models.

Gradients have a loss scale: that of the engine whose `backward` was called, or none after a plain `loss.backward()`.
Where gradients enter an engine's model they get the engine's scale, and where they leave it they get the scale that
they had before. Aliases of the tensors do this, because uses inside the model (a loss of logits that are returned too)
must not get the factor twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from torch import Tensor

from shardwell.optim.loss_scale import LossScale
from shardwell.runtime.pytree import alias_with

_carried = SimpleNamespace(scale=1.0)  # of the gradients of the running backward outside of models


@contextlib.contextmanager
def carrying(scale: LossScale) -> Iterator[None]:
    """Return a context in which backward begins with this scale."""
    before, _carried.scale = _carried.scale, scale.value
    try:
        yield
    finally:
        _carried.scale = before


def scaled_output(tensor: Tensor, scale: LossScale, met: Callable[[], None]) -> Tensor:
    """Return an output whose gradient gets the model's scale, and calls `met` when it does."""
    if not tensor.requires_grad:
        return tensor

    def enter(grad: Tensor) -> Tensor:
        met()
        return grad if _carried.scale == scale.value else grad * (scale.value / _carried.scale)

    return alias_with(tensor, enter)


def unscaled_input(tensor: Tensor, scale: LossScale) -> Tensor:
    """Return an input whose gradient leaves without the model's scale."""
    if not tensor.requires_grad:
        return tensor
    is_last = tensor.is_leaf  # no later node would remove the scale

    def leave(grad: Tensor) -> Tensor:
        return grad * ((1.0 if is_last else _carried.scale) / scale.value)

    return alias_with(tensor, leave)
