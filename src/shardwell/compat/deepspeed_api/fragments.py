"""Changes of many gradients in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from shardwell.utils import safe_get_full_grad, safe_set_full_grad


def safe_update_full_grad_vectorized(
    params: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the gradient of each parameter by `update_func(gradient, parameter)`. All ranks must call it."""
    for parameter in params:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))
