"""Pain: bf16 gradients of micro-steps are added up in bf16, and small ones are lost."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.utils import safe_get_full_grad
from tests.support.models import zero
from tests.support.ranks import Ranks

MICRO_STEPS = 32
TINY = 2.0**-9  # next to one: bf16 has eight bits
MEAN = (1.0 + (MICRO_STEPS - 1) * TINY) / MICRO_STEPS


class Scale(nn.Module):
    """The gradient of each parameter is the sum of what it is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(5, 7)), nn.Parameter(torch.zeros(3))

    def forward(self, size: Tensor) -> Tensor:
        return (self.weight * size).sum() + (self.bias * size).sum()


def accumulate(stage: int, dtype: str | None) -> list[Tensor]:
    """The averaged gradients of one large micro-step and many tiny ones."""
    model = Scale()
    config: dict[str, Any] = zero(stage, bf16={"enabled": True}, gradient_accumulation_steps=MICRO_STEPS)
    config["data_types"] = {"grad_accum_dtype": dtype}
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), config=config)
    for micro in range(MICRO_STEPS):
        engine.backward(engine(torch.tensor(1.0 if micro == 0 else TINY)))
        if micro + 1 < MICRO_STEPS:
            engine.step()
    return [safe_get_full_grad(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_gradients_add_up_in_fp32(ranks: Ranks, stage: int) -> None:
    """The default throws small gradients away; here it keeps them, and only who asks for bf16 gets bf16."""
    for gradients in ranks.run(2, accumulate, stage, None):
        for found in gradients:
            assert found == pytest.approx(MEAN, rel=1e-6)
    for gradients in ranks.run(2, accumulate, stage, "bf16"):
        for found in gradients:
            assert found == pytest.approx(1.0 / MICRO_STEPS, rel=1e-2)
            assert (abs(found - MEAN) > 0.04 * MEAN).all()


class Scales(nn.Module):
    """Two units, of which the first may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scale(), Scale()])

    def forward(self, size: Tensor, first: int) -> Tensor:
        return torch.stack([block(size) for block in self.blocks[first:]]).sum()


def scale_apart(stage: int, dtype: str, left_out: int) -> list[Tensor]:
    """The averaged gradients of three micro-steps of which the user divides two; one rank may join late."""
    model = Scales()
    config = zero(stage, bf16={"enabled": True}, gradient_accumulation_steps=3, gradient_predivide_factor=2.0)
    config["data_types"] = {"grad_accum_dtype": dtype}
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), config=config)
    for micro, by_hand in enumerate((True, False, True)):
        first = 1 if micro == 0 and dist.get_rank() == left_out else 0
        with engine.no_sync() if micro < 2 else contextlib.nullcontext():
            engine.backward(engine(torch.tensor(1.0), first), scale_wrt_gas=not by_hand)
        if micro < 2:
            engine.step()
    return [safe_get_full_grad(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize("left_out", [-1, 0, 1], ids=["all alike", "rank 0 late", "rank 1 late"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_micro_step_is_divided_as_it_says(ranks: Ranks, stage: int, left_out: int) -> None:
    always = 1.0 + 1 / 3 + 1.0
    partly = always if left_out < 0 else 0.5 + 1 / 3 + 1.0
    dtype, limit = (("fp32", 1e-6), ("bf16", 1e-2))[(stage + left_out) % 2]  # both at each stage, and for each rank
    for gradients in ranks.run(2, scale_apart, stage, dtype, left_out):
        for found, expected in zip(gradients, (partly, partly, always, always), strict=True):
            assert found == pytest.approx(expected, rel=limit)
