"""Lion: the sign of an interpolated momentum, with decoupled weight decay. Elementwise, one state of Ψ elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from shardwell.errors import ConfigError

_NOT_NEGATIVE = ("lr", "weight_decay", "momentum", "eps", "adam_eps")


class Lion(Optimizer):
    """An optimizer that moves every element by `lr` along `sign(lerp(momentum, gradient, 1 - beta1))`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        check_options(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the tensors that have a gradient."""
        loss = evaluate(closure)
        for group in self.param_groups:
            tensors, gradients = with_gradients(group)
            if not tensors:
                continue
            momenta = [self._momentum(tensor) for tensor in tensors]
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            updates = torch._foreach_lerp(momenta, gradients, 1 - beta1)
            torch._foreach_sign_(updates)
            if group["weight_decay"]:
                torch._foreach_mul_(tensors, 1 - lr * group["weight_decay"])
            torch._foreach_add_(tensors, updates, alpha=-lr)
            torch._foreach_lerp_(momenta, gradients, 1 - beta2)
        return loss

    def _momentum(self, tensor: Tensor) -> Tensor:
        state = self.state[tensor]
        if not state:
            state["exp_avg"] = torch.zeros_like(tensor)
        momentum: Tensor = state["exp_avg"]
        return momentum


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of a closure that was passed to `step`, computed with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradients(group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of a parameter group that have a gradient, and their gradients."""
    tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
    return tensors, [tensor.grad for tensor in tensors]


def check_options(optimizer: Optimizer) -> None:
    """Refuse hyperparameters outside their range."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        for key in _NOT_NEGATIVE:
            if key in group and not group[key] >= 0:
                raise ConfigError(f"{name}: {key} is {group[key]}; it must be 0 or more")
        betas = group["betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"{name}: betas is {betas}; it must be two numbers, at least 0 and below 1")
