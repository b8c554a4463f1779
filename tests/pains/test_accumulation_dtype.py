"""Pain: bf16 gradients of micro-steps are added up in bf16, and small ones are lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell.utils import safe_get_full_grad
from tests.models import zero
from tests.ranks import Ranks

MICRO_STEPS = 64
TINY = 2.0**-10  # next to one: bf16 has eight bits
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
