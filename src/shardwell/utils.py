"""Reading and changing what is sharded: masters, gradients and optimizer state of single parameters.

The `full` functions take and give whole tensors; all ranks must call them, with the same values. The `local` ones take
and give this rank's part (1D, None where it holds none) and talk to nobody. Gradients exist between a backward and its
step, averaged and without the loss scale. Momenta and the like exist after the first step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwell.optim.access import Access, reading


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """The values that the optimizer steps: fp32 under mixed precision."""
    found: Tensor = reading(lambda access: access.master(), param)
    return found


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    found: Tensor | None = reading(lambda access: access.gradient(), param)
    return found


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """One entry of the state, such as `exp_avg`; None before the first step, or if there is no such entry."""
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


__all__ = [name for name in list(globals()) if name.startswith("safe_")] + ["Access"]
