"""What would train other numbers without a word: graphs from before a step, and values that a forward changes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from tests.programs.trial import Lines
from tests.support.models import zero
from tests.support.ranks import Ranks


class Clamped(nn.Module):
    """Changes its own parameters, behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-0.05, 0.05)
        return self.linear(x)


def engine_for(model: nn.Module, stage: int, offload: str) -> shardwell.Engine:
    block: dict[str, Any] = {"offload_optimizer": {"device": offload}} if offload else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, zero_optimization=block)).engine


def step_under_a_graph(stage: int, offload: str) -> str:
    torch.manual_seed(0)
    engine = engine_for(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), stage, offload)
    x = torch.randn(3, 6)
    old = engine(x).sum()
    engine.backward(engine(x).square().mean())
    engine.step()
    try:
        old.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("offload", ["", "cpu"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_graph_from_before_a_step_raises_as_in_plain_pytorch(ranks: Ranks, stage: int, offload: str) -> None:
    for said in ranks.run(2, step_under_a_graph, stage, offload):
        assert "modified by an inplace operation" in said


def clamp_in_forward(stage: int) -> tuple[list[str], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(Clamped(), nn.Tanh(), Clamped())
    lines = Lines()
    logging.getLogger("shardwell").addHandler(lines)
    engine = engine_for(model, stage, "")
    x, losses = torch.randn(3, 6), []
    for _ in range(3):
        loss = engine(x).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    logging.getLogger("shardwell").removeHandler(lines)
    return [line for line in lines.said if "the change is lost" in line], losses


def plain_clamp() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(Clamped(), nn.Tanh(), Clamped())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = torch.randn(3, 6), []
    for _ in range(3):
        loss = model(x).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_forward_that_changes_its_parameters_data_works_or_is_told(ranks: Ranks) -> None:
    expected = plain_clamp()
    for said, losses in ranks.run(2, clamp_in_forward, 2):
        assert not said
        assert losses == pytest.approx(expected, rel=1e-5)
    found = ranks.run(2, clamp_in_forward, 3)
    assert any(said for said, _ in found)
