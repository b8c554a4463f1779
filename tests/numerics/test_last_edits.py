"""Values that are set after the last step, as pruning does at the end of training, are there when the engine ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import shardwell
from tests.support.models import zero


def trained(stage: int, **others: Any) -> tuple[nn.Sequential, shardwell.Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, **others)).engine
    engine.backward(engine(torch.ones(2, 6)).float().square().mean())
    engine.step()
    return model, engine


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ends", ["destroy", "initialize"])
def test_data_that_was_set_after_the_last_step_stays(stage: int, ends: str, precision: dict[str, Any]) -> None:
    model, engine = trained(stage, **precision)
    expected = torch.arange(36.0).view(6, 6)
    model[0].weight.data = expected.to(model[0].weight.dtype)
    if ends == "initialize":
        engine = shardwell.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=zero(stage, **precision)
        ).engine
    engine.destroy()
    assert torch.equal(model[0].weight, expected)


def test_pruning_that_is_made_permanent_after_training_stays() -> None:
    model, engine = trained(2)
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    engine.backward(engine(torch.ones(2, 6)).square().mean())
    engine.step()
    prune.remove(model[0], "weight")
    engine.destroy()
    assert int((model[0].weight == 0).sum()) == 18


def test_a_model_that_was_moved_before_the_end_keeps_its_master_weights() -> None:
    model, engine = trained(1, bf16={"enabled": True})
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    model.double()
    engine.destroy()
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.float32
        assert not torch.equal(parameter, parameter.bfloat16().float()), name
        assert torch.equal(parameter.bfloat16(), before[name].bfloat16()), name
