"""What codes of gradients lose is said later: the sum of all that was applied stays within one step of a code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell.utils import safe_get_full_fp32_param
from tests.support.models import zero
from tests.support.ranks import Ranks

NUMEL = 2048
BF16 = {"bf16": {"enabled": True}}
GROWS = {"fp16": {"enabled": True, "initial_scale_power": 2, "loss_scale_window": 1}}  # doubles at every step


class Dot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


class Dots(nn.Module):
    """Whose gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Dot(), Dot()])

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.blocks[0](first).float() + self.blocks[1](second).float()


def gradient() -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).bfloat16().float() / 16


def engine_on_two_nodes(**extra: Any) -> Any:
    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    model = Dots()
    own = {"codecs": {"feedback": True}, "nonfinite": "skip"}
    config = zero(3, zero_optimization={"zero_quantized_gradients": True}, shardwell=own, **extra)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config).engine


def steps_off(engine: Any, count: int) -> float:
    """How far the weights are from where so many gradients lead, in steps of int4."""
    weight = safe_get_full_fp32_param(engine.module.blocks[0].weight)
    expected = gradient()
    return float((weight + count * expected).abs().max() / (expected.abs().max() / 7))


def trained(extra: dict[str, Any], how: str) -> float:
    """Some steps with the same gradient; not all are applied."""
    engine, one, count = engine_on_two_nodes(**extra), gradient(), 0
    for step in range(40 if "bf16" in extra else 12):
        odd = step % 2 == 1
        if how == "kept back" and odd:
            with engine.no_sync():
                engine.backward(engine(one, one))
            count += 1
        engine.backward(engine(one, one * float("inf") if how == "left out" and odd else one))
        if how == "forgotten" and odd:
            engine.zero_grad()
            continue
        engine.step()
        count += not (how == "left out" and odd)
    assert engine.skipped_steps == (20 if how == "left out" else 0)
    return steps_off(engine, count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "how", "most"),
    [
        (BF16, "plainly", 0.7),
        (GROWS, "plainly", 0.7),
        (BF16, "left out", 0.7),
        (BF16, "forgotten", 0.7),
        (BF16, "kept back", 1.2),  # of two gradients at once
    ],
    ids=["bf16", "growing scale", "steps left out", "gradients forgotten", "gradients kept back"],
)
def test_what_was_lost_does_not_grow(ranks: Ranks, extra: dict[str, Any], how: str, most: float) -> None:
    for off in ranks.run(2, trained, extra, how):
        assert 0 < off < most


def loaded(path: str) -> float:
    """How far two engines are after a step from one checkpoint, one of which had trained on."""
    one, other = engine_on_two_nodes(**BF16), engine_on_two_nodes(**BF16)
    value = gradient()
    for _ in range(3):
        one.backward(one(value, value))
        one.step()
    one.save_checkpoint(path)
    one.backward(one(value, 3 * value))
    one.step()
    weights = []
    for engine in (one, other):
        engine.load_checkpoint(path)
        engine.backward(engine(value, value))
        engine.step()
        weights.append(safe_get_full_fp32_param(engine.module.blocks[1].weight))
    return float((weights[0] - weights[1]).abs().max())


def test_a_checkpoint_brings_nothing_that_was_lost_after_it(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, loaded, str(tmp_path)) == [0.0, 0.0]
