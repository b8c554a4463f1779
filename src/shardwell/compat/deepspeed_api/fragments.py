"""`safe_get_*` and `safe_set_*` as DeepSpeed answers, over `shardwell.utils`.

Three things differ from shardwell's own: a parameter that is not trained has no fp32 weights and no gradient (None); a
rank that stores nothing of a trained parameter has an empty part of it and not None; and gradients have the dtype in
which DeepSpeed accumulates, the model's unless `data_types.grad_accum_dtype` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardwell import utils
from shardwell.utils import (
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]

GRADIENT_DTYPE = "_deepspeed_gradient_dtype"  # the attribute of a parameter that an engine sets


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the values that the optimizer steps; None if it steps none. All ranks must call it."""
    return utils.safe_get_full_fp32_param(param) if param.requires_grad else None


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the averaged gradient without the loss scale; None if there is none. All ranks must call it."""
    return _as_accumulated(param, utils.safe_get_full_grad(param) if param.requires_grad else None)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """Return one entry of the optimizer's state; None if there is none. All ranks must call it."""
    return utils.safe_get_full_optimizer_state(param, optim_state_key) if param.requires_grad else None


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the values that the optimizer steps (1D)."""
    if not param.requires_grad:
        return None
    found = utils.safe_get_local_fp32_param(param)
    return torch.empty(0) if found is None else found


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the averaged gradient (1D)."""
    if not param.requires_grad:
        return None
    found = utils.safe_get_local_grad(param)
    return _as_accumulated(param, torch.empty(0) if found is None and _stores_none_of(param) else found)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """Return this rank's part of one entry of the optimizer's state (1D)."""
    if not param.requires_grad:
        return None
    found = utils.safe_get_local_optimizer_state(param, optim_state_key)
    return torch.empty(0) if found is None and _stores_none_of(param) else found


def safe_update_full_grad_vectorized(
    params: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the gradient of each parameter by `update_func(gradient, parameter)`. All ranks must call it."""
    for parameter in params:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


def _stores_none_of(param: nn.Parameter) -> bool:
    return utils.safe_get_local_fp32_param(param) is None


def _as_accumulated(param: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.to(getattr(param, GRADIENT_DTYPE, param.dtype))
