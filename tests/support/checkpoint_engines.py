"""Engines of a small model on one rank, to save and to load."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import shardwell
from shardwell.utils import safe_get_full_fp32_param
from tests.support.models import Gpt, batches, zero
from tests.support.training import Case

CASE = Case(dtype=torch.float32)


def alone(stage: int = 3, **config: Any) -> shardwell.Engine:
    torch.manual_seed(0)
    model = Gpt()
    config = zero(stage, **{"shardwell": {"shard_at_world_one": True}, **config})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine


def step(engine: shardwell.Engine, number: int = 0) -> None:
    engine.backward(engine(batches(number + 1, 4)[number]))
    engine.step()


def masters(engine: shardwell.Engine) -> list[Tensor]:
    return [safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]
