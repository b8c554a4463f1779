"""An engine that is handed to Accelerate trains as a plain model does."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwell
from tests.support.models import zero
from tests.support.ranks import Ranks

accelerate = pytest.importorskip("accelerate")
STEPS, ROWS = 3, 8


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data() -> torch.Tensor:
    return torch.randn(STEPS, ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def plainly() -> dict[str, Any]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in data():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def with_accelerate(stage: int, micro: int) -> dict[str, Any]:
    model = net()
    made = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, optimizer, *_ = shardwell.initialize(model=model, optimizer=made, config=zero(stage), device="cpu")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=micro)
    try:
        prepared, optimizer = accelerator.prepare(engine, optimizer)
        assert prepared is engine
        for batch in data():
            mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
            for rows in mine.chunk(micro):
                with accelerator.accumulate(prepared):
                    accelerator.backward(prepared(rows).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
    return dict(engine.state_dict().items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_prepared_engine_trains_as_a_plain_model(ranks: Ranks, stage: int) -> None:
    expected = plainly()
    for found in ranks.run(2, with_accelerate, stage, 2 if stage in (1, 3) else 1):
        for name, values in expected.items():
            assert abs(found[name] - values).max() < 1e-9, name


def test_two_ways_to_accumulate_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    config = {**zero(1), "gradient_accumulation_steps": 4}
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shardwell.initialize(model=model, optimizer=made, config=config, device="cpu").engine
    with caplog.at_level(logging.WARNING, "shardwell"):
        assert accelerate.Accelerator(cpu=True).prepare(engine) is engine
    assert "accumulates 4 micro-steps by itself" in caplog.text
