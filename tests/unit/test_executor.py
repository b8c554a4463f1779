"""Who performs updates: plain runs enter nothing of offloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell import optim
from shardwell.offload.early_update import EarlyExecutor
from shardwell.offload.host_executor import HostExecutor
from shardwell.optim.executor import InlineExecutor
from tests.support.internals import reducer_of


def executor_for(stage: int, kind: str = "AdamW", **others: Any) -> Any:
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": kind, "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, **others},
    }
    engine, *_ = shardwell.initialize(model=nn.Sequential(nn.Linear(4, 4)), config=config, device="cpu")
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert engine.optimizer is not None
    found = engine.optimizer.executor
    assert (reducer_of(engine).reduced is None) == (type(found) is InlineExecutor)
    engine.destroy()
    return type(found)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plain_runs_step_in_line(stage: int) -> None:
    assert executor_for(stage) is InlineExecutor


def test_a_tier_chooses_the_executor() -> None:
    on_host = {"offload_optimizer": {"device": "cpu"}}
    assert executor_for(2, **on_host) is HostExecutor
    assert executor_for(2, "NAdam", **on_host) is EarlyExecutor  # there is no kernel for the host


def test_optim_knows_nothing_of_offloading() -> None:
    for file in Path(optim.__file__).parent.glob("*.py"):
        assert "shardwell.offload" not in file.read_text(), file
