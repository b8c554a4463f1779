"""For training code: reading and changing sharded state, and naming units.

`safe_get_full_*` and `safe_set_full_*` return and set a parameter's master weights, gradient or optimizer state as full
tensors; all ranks must call them, with the same values. The `local` functions return and set this rank's part (1D, None
where it holds none) without any collective. Gradients exist between a backward and its step, averaged and without the
loss scale (None after `engine.step()`; after a step of the user's own optimizer `p.grad` is still set, and reading it
raises an error that says so). One rank alone cannot read gradients that are not averaged yet, because their boundary is
to come. Moments and other optimizer state exist after the first step.

`ExponentialMovingAverage` keeps an average of an engine's parameters, in shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from shardwell.engine.ema import ExponentialMovingAverage
from shardwell.errors import ShardwellError
from shardwell.optim.param_access import reading
from shardwell.optim.sharded_gradient import check_not_used_up
from shardwell.sharding.wrap import is_leaf, set_leaf


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """Return the values that the optimizer steps: fp32 under mixed precision."""
    found: Tensor = reading(lambda access: access.master(), param)
    return found


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    check_not_used_up(param)
    found: Tensor | None = reading(lambda access: access.gradient(), param)
    return found


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """Return one entry of the state, such as `exp_avg`; None before the first step, or if there is no such entry."""
    return reading(lambda access: access.state(optim_state_key), param)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    reading(lambda access: access.set_master(value), param)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    reading(lambda access: access.set_gradient(value), param)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Any, optim_state_key: str) -> None:
    reading(lambda access: access.set_state(optim_state_key, value), param)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    found: Tensor | None = reading(lambda access: access.local_master(), param)
    return found


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    check_not_used_up(param)
    found: Tensor | None = reading(lambda access: access.local_gradient(), param)
    return found


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    return reading(lambda access: access.local_state().get(optim_state_key), param)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    reading(lambda access: access.set_local_master(value), param)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    reading(lambda access: access.set_local_gradient(value), param)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Any, optim_state_key: str) -> None:
    reading(lambda access: access.set_local_state(optim_state_key, value), param)


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Make each module of these classes (or class names) one unit, gathered as a whole; call it before `initialize`."""
    found = _of_classes(model, leaf_module_classes)
    for module in found:
        set_leaf(module)
    return found


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Take `set_z3_leaf_modules` back."""
    found = _of_classes(model, leaf_module_classes)
    for module in found:
        set_leaf(module, False)
    return found


def set_z3_leaf_module(module: nn.Module, flag: bool = True) -> None:
    """Make this module one unit, or take that back; call it before `initialize`."""
    set_leaf(module, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_leaf(module)]


def _of_classes(model: nn.Module, classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    names = {kind if isinstance(kind, str) else kind.__name__ for kind in classes}
    found = [module for module in model.modules() if names & {base.__name__ for base in type(module).__mro__}]
    if not found:
        raise ShardwellError(f"the model has no module of class {', '.join(sorted(names))}")
    return found


__all__ = [
    "ExponentialMovingAverage",
    *(name for name in list(globals()) if name.startswith("safe_") or name.endswith(("leaf_module", "leaf_modules"))),
]
