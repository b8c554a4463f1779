"""LAMB: Adam's update, scaled for each parameter by the ratio of the parameter's norm to the update's norm.

The norms are those of full parameters. A step therefore has two parts, with one all-reduce of sums between them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from shardwell.errors import ConfigError
from shardwell.optim.full_tensors import FullTensors, LocalFullTensors
from shardwell.optim.lion import check_options, evaluate, with_gradients


class Lamb(Optimizer):
    """An optimizer that steps each parameter by `lr * ratio * update`.

    All its tensors are on one device, and the host never waits. `ratio` is clamped to [`min_coeff`, `max_coeff`]. It is
    1 for a parameter that is zero, or whose update is zero.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        clamps = {"bias_correction": bias_correction, "max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, defaults | clamps)
        check_options(self)
        for group in self.param_groups:
            low, high = group["min_coeff"], group["max_coeff"]
            if not 0 <= low <= high:
                raise ConfigError(f"Lamb: min_coeff is {low} and max_coeff is {high}; it must be 0 <= min <= max")
        self.whole: FullTensors = LocalFullTensors()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the tensors that have a gradient. Over shards, every rank must call it."""
        loss = evaluate(closure)
        work: list[tuple[dict[str, Any], list[Tensor], list[Tensor]]] = []
        parts: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            tensors, gradients = with_gradients(group)
            if tensors:
                updates = self._updates(group, tensors, gradients)
                work.append((group, tensors, updates))
                parts += zip(tensors, _squared_norms(tensors, updates), strict=True)
        sums = iter(self.whole.sums(parts))
        for group, tensors, updates in work:
            ratios = _trust_ratios(torch.stack([next(sums) for _ in tensors]), group["min_coeff"], group["max_coeff"])
            torch._foreach_addcmul_(tensors, updates, ratios.unbind(), value=-float(group["lr"]))
        return loss

    def _updates(self, group: dict[str, Any], tensors: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Add the gradients to the moments, and return m / (sqrt(v) + eps) + weight_decay * p."""
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        steps, means, squares = adam_state(self, tensors)
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        divisors = torch._foreach_sqrt(squares)
        if group["bias_correction"]:
            torch._foreach_div_(divisors, [(1 - beta2 ** float(step)) ** 0.5 for step in steps])
        torch._foreach_add_(divisors, group["eps"])
        updates = torch._foreach_div(means, divisors)
        if group["bias_correction"]:
            torch._foreach_div_(updates, [1 - beta1 ** float(step) for step in steps])
        if decay:
            torch._foreach_add_(updates, tensors, alpha=decay)
        return list(updates)


def adam_state(optimizer: Optimizer, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return `step`, `exp_avg` and `exp_avg_sq` of each tensor; `step` is on the CPU, so reading it never waits."""
    states = [optimizer.state[tensor] for tensor in tensors]
    for state, tensor in zip(states, tensors, strict=True):
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
    return [s["step"] for s in states], [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]


def _squared_norms(tensors: list[Tensor], updates: list[Tensor]) -> tuple[Tensor, ...]:
    """Return for each tensor fp64[2]: the sums of its own squares and of its update's, computed at least in fp32."""
    wide = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    norms = torch.stack(torch._foreach_norm([*tensors, *updates], 2, dtype=wide))
    return norms.double().square().view(2, -1).t().contiguous().unbind()


def _trust_ratios(sums: Tensor, low: float, high: float) -> Tensor:
    """Return for each row of `sums` the norm of the parameter over the norm of its update (1D)."""
    norms = sums.sqrt()
    ratios = (norms[:, 0] / norms[:, 1]).clamp(low, high)
    return torch.where((norms > 0).all(dim=1), ratios, 1.0)
