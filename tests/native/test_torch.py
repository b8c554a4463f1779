"""One step beside torch.optim's, from the same numbers.

torch fuses some products and sums into one rounding, the kernels never do. So results may differ where a sum cancels,
but neither is nearer to the truth: the same step in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from shardwell import native
from shardwell.optim.lion import Lion

NUMEL, STEPS = 20_000, 6


@dataclass(frozen=True)
class Pair:
    """torch's optimizer, the rule that is meant to be the same, and the names of its state."""

    make: Callable[..., Optimizer]
    options: dict[str, Any]
    rule: Callable[[int], native.Rule]
    state: tuple[str, ...]


MOMENTS, MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
PAIRS = {
    "adamw": Pair(AdamW, {"lr": 1e-3}, lambda t: native.Adam(1e-3, t, weight_decay=0.01, decoupled=True), MOMENTS),
    "adam": Pair(
        Adam,
        {"lr": 1e-2, "betas": (0.4, 0.9), "eps": 1e-6},
        lambda t: native.Adam(1e-2, t, (0.4, 0.9), 1e-6),
        MOMENTS,
    ),
    "sgd": Pair(SGD, {"lr": 0.1, "weight_decay": 0.1}, lambda t: native.Sgd(0.1, weight_decay=0.1), ()),
    "momentum": Pair(
        SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.2},
        lambda t: native.Sgd(0.1, 0.9, 0.2, first=t == 1),
        MOMENTUM,
    ),
    "nesterov": Pair(
        SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        lambda t: native.Sgd(0.1, 0.9, nesterov=True, first=t == 1),
        MOMENTUM,
    ),
    "adagrad": Pair(Adagrad, {"lr": 0.1, "lr_decay": 0.1}, lambda t: native.Adagrad(0.1, t, 0.1), ("sum",)),
    "lion": Pair(Lion, {"lr": 1e-4, "weight_decay": 0.1}, lambda t: native.Lion(1e-4, weight_decay=0.1), ("exp_avg",)),
}
FUSED = [(name, "fused") for name in PAIRS if name != "lion"]
FOREACH = [(name, "foreach") for name in PAIRS if name != "lion"]


def numbers(seed: int, size: float) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * size


def spacing(values: Tensor) -> Tensor:
    """One unit in the last place of fp32."""
    return torch.nextafter(values.abs(), torch.tensor(torch.inf)) - values.abs()


def steps(pair: Pair, **how: bool) -> Any:
    """Of torch's optimizer: before and after each step, what the kernel makes of the same, and what fp64 does."""
    parameter = torch.nn.Parameter(numbers(0, 0.02))
    optimizer = pair.make([parameter], **pair.options, **how)
    exact = torch.nn.Parameter(parameter.detach().double())
    truth = pair.make([exact], **pair.options)
    for step in range(1, STEPS + 1):
        before = parameter.detach().clone()
        state = [_tensor(optimizer.state[parameter].get(key), before) for key in pair.state]
        old = [value.clone() for value in state]
        gradient = numbers(step, 1e-2)
        exact.data.copy_(before)
        for key, value in zip(pair.state, old, strict=True):
            if truth.state[exact].get(key) is not None:
                truth.state[exact][key].copy_(value)
        parameter.grad, exact.grad, ours = gradient.clone(), gradient.double(), before.clone()
        optimizer.step()
        truth.step()
        native.update(pair.rule(step), native.Stretch(gradient, ours, tuple(state)))
        theirs = [optimizer.state[parameter][key] for key in pair.state]
        yield before, old, gradient, (ours, state), (parameter.detach(), theirs), exact.detach()


def _tensor(value: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if value is None else value.clone()


@pytest.mark.parametrize(("name", "how"), [*FUSED, *FOREACH, ("lion", None)])
def test_a_step_is_as_exact_as_torchs(name: str, how: str | None) -> None:
    pair = PAIRS[name]
    for before, _, _, (ours, _), (theirs, _), exact in steps(pair, **({how: True} if how else {})):
        scale = spacing(torch.maximum(before.abs(), torch.tensor(pair.options["lr"]))).double()
        off, torch_off = (((result.double() - exact).abs() / scale).max() for result in (ours, theirs))
        assert off <= 1.5 * torch_off + 1, (float(off), float(torch_off))


def test_adamw_is_torchs_but_for_the_last_bits() -> None:
    lr = torch.tensor(PAIRS["adamw"].options["lr"])
    for before, (old, _), gradient, (ours, (first, second)), (theirs, (m, v)), _ in steps(PAIRS["adamw"], fused=True):
        assert ((first - m).abs() <= spacing(torch.maximum(old.abs(), gradient.abs()))).all()
        assert ((second - v).abs() <= spacing(v)).all()
        assert ((ours - theirs).abs() <= 4 * spacing(torch.maximum(before.abs(), lr))).all()
        assert (ours != theirs).float().mean() < 0.1


def test_lion_moves_as_ours_but_where_its_direction_is_lost_in_rounding() -> None:
    for before, (old,), gradient, (ours, (momentum,)), (theirs, (expected,)), _ in steps(PAIRS["lion"]):
        assert ((momentum - expected).abs() <= spacing(torch.maximum(old.abs(), gradient.abs()))).all()
        turned = (ours - theirs).abs() > spacing(before)
        direction = old + (gradient - old) * 0.1
        assert (direction.abs()[turned] <= spacing(old)[turned]).all()
