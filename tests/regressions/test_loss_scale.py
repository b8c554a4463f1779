"""Pain: a few overflows in fp16 end the job with "the loss scale is already at its minimum"."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks

WIDTH = 8
BAD = range(2, 9)  # steps whose loss overflows
STEPS = 14


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def train(stage: int, bad: range) -> dict[str, Any]:
    """In bad steps the loss of one rank alone is too large for any scale."""
    torch.manual_seed(0)
    model = Model()
    config = zero(
        stage,
        fp16={"enabled": True, "initial_scale_power": 3, "hysteresis": 1, "loss_scale_window": 4, "min_loss_scale": 1},
    )
    engine, *_ = shardwell.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100),
        config=config,
    )
    scales, skipped, losses = [], [], []
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            before = whole_parameters(model) if step in bad else {}
            loss = engine(rows)
            engine.backward(loss * 1e30 if step in bad and dist.get_rank() == 1 else loss)
            engine.step()
            after = whole_parameters(model) if step in bad else {}
            assert all(torch.equal(values, after[name]) for name, values in before.items())
            assert engine.optimizer.overflow == (step in bad)
            scales.append(engine.loss_scale)
            skipped.append(engine.skipped_steps)
            losses.append(loss.item())
    return {
        "scales": scales,
        "skipped": skipped,
        "losses": losses,
        "words": [str(one.message) for one in caught if "smallest loss scale" in str(one.message)],
        "rates": engine.lr_scheduler.last_epoch,
        "parameters": whole_parameters(model),
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overflow_at_the_smallest_scale_skips_steps_and_training_recovers(ranks: Ranks, stage: int) -> None:
    """A scale at its minimum is an exception; here it is one warning, and all ranks skip the same steps."""
    answers = ranks.run(2, train, stage, BAD)
    for answer in answers:
        assert answer["scales"][:9] == [8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]
        assert answer["scales"][-1] == 2.0  # four good steps after the last bad one
        assert answer["skipped"] == [min(max(step - 1, 0), len(BAD)) for step in range(STEPS)]
        assert len(answer["words"]) == 1
        assert "bf16" in answer["words"][0]
        assert answer["losses"][2:10] == [answer["losses"][2]] * 8  # nothing moves, and then it goes on
        assert answer["losses"][-1] < answer["losses"][9] < answer["losses"][0]
    first, second = (answer["parameters"] for answer in answers)
    assert all((first[name] == second[name]).all() for name in first)
    # a schedule counts the steps that were taken
    calm = ranks.run(2, train, stage, range(0))[0]
    assert calm["words"] == []
    assert calm["skipped"][-1] == 0
    assert calm["rates"] - answers[0]["rates"] == len(BAD)
