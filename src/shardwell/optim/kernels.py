"""The torch optimizers that `shardwell.native` can step on the host, with the state that torch's own keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell import native
from shardwell.optim.lion import Lion

Options = dict[str, Any]  # of a parameter group
Born = Callable[[Tensor, Options], dict[str, Any]]
RuleOf = Callable[[Options, dict[str, Any]], native.Rule]

_NOT_THERE = ("amsgrad", "maximize", "differentiable")


@dataclass(frozen=True)
class Kernel:
    """One kind of optimizer."""

    keys: tuple[str, ...]  # of the state, in the order that the rule takes
    rule: RuleOf  # of the step that comes
    birth: Born  # the state before the first step
    threads: int = 1

    def step(
        self, master: Tensor, gradient: Tensor, state: dict[str, Any], options: Options, factor: float, out: Tensor
    ) -> None:
        """Apply one step to a stretch of masters, and write the new parameters to `out`."""
        if "step" in state:
            state["step"] += 1
        rule = self.rule(options, state)
        kept = tuple(state[key] for key in self.keys if state.get(key) is not None)
        narrow = out if out.dtype.itemsize == 2 else None
        native.update(rule, native.Stretch(gradient, master, kept, factor, narrow), self.threads)
        if narrow is None and out.data_ptr() != master.data_ptr():
            out.copy_(master)


def kernel_for(inner: Optimizer, threads: int) -> Kernel | None:
    """How to step on the host what `inner` steps; None if that is not known."""
    if any(group.get(name) for group in inner.param_groups for name in _NOT_THERE):
        return None
    known = _KERNELS.get(type(inner))
    return None if known is None else Kernel(*known, threads)


def _adam(decoupled: bool) -> RuleOf:
    def rule(options: Options, state: dict[str, Any]) -> native.Rule:
        apart = decoupled or bool(options.get("decoupled_weight_decay"))
        return native.Adam(
            float(options["lr"]),
            int(state["step"]),
            _pair(options["betas"]),
            options["eps"],
            options["weight_decay"],
            apart,
        )

    return rule


def _zeros(*keys: str, counts: bool) -> Born:
    def birth(master: Tensor, options: Options) -> dict[str, Any]:
        count = {"step": torch.tensor(0.0)} if counts else {}
        return {**count, **{key: torch.zeros_like(master) for key in keys}}

    return birth


def _sgd(options: Options, state: dict[str, Any]) -> native.Rule:
    first = bool(state.pop("first", False))
    return native.Sgd(
        float(options["lr"]),
        options["momentum"],
        options["dampening"],
        options["weight_decay"],
        options["nesterov"],
        first,
    )


def _sgd_birth(master: Tensor, options: Options) -> dict[str, Any]:
    return {"momentum_buffer": torch.zeros_like(master), "first": True} if options["momentum"] else {}


def _adagrad(options: Options, state: dict[str, Any]) -> native.Rule:
    return native.Adagrad(
        float(options["lr"]), int(state["step"]), options["lr_decay"], options["eps"], options["weight_decay"]
    )


def _adagrad_birth(master: Tensor, options: Options) -> dict[str, Any]:
    return {"step": torch.tensor(0.0), "sum": torch.full_like(master, options["initial_accumulator_value"])}


def _lion(options: Options, state: dict[str, Any]) -> native.Rule:
    return native.Lion(float(options["lr"]), _pair(options["betas"]), options["weight_decay"])


def _pair(betas: Any) -> tuple[float, float]:
    first, second = betas
    return float(first), float(second)


_MOMENTS = ("exp_avg", "exp_avg_sq")
_KERNELS: dict[type[Optimizer], tuple[tuple[str, ...], RuleOf, Born]] = {
    torch.optim.Adam: (_MOMENTS, _adam(False), _zeros(*_MOMENTS, counts=True)),
    torch.optim.AdamW: (_MOMENTS, _adam(True), _zeros(*_MOMENTS, counts=True)),
    torch.optim.SGD: (("momentum_buffer",), _sgd, _sgd_birth),
    torch.optim.Adagrad: (("sum",), _adagrad, _adagrad_birth),
    Lion: (("exp_avg",), _lion, _zeros("exp_avg", counts=False)),
}
