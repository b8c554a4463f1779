"""On CUDA: host offload keeps the optimizer state of the first units on a GPU that has room."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

import shardwell
from shardwell.memory import Tier
from tests.support.checkpoint_legs import everything
from tests.support.placements import BELOW, Stack, configured
from tests.support.ranks import Ranks

pytestmark = pytest.mark.gpu

OPEN = {"offload_optimizer": {"device": "cpu"}}


def trained(block: dict[str, Any], stage: int, clip: float) -> dict[str, Any]:
    """Four steps, with foreach operations, which round as the host's kernels do."""
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    config = configured(block, {"commit": "auto"}, stage, train_micro_batch_size_per_gpu=4, gradient_clipping=clip)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}}
    torch.manual_seed(0)
    engine = shardwell.initialize(model=Stack(), config=config).engine
    for step in range(4):
        torch.manual_seed(step)
        engine.backward(engine(torch.randn(4, 64)))
        engine.step()
    engine.optimizer.settle()
    planned = engine.plan((torch.randn(4, 64, device=engine.device),))
    return {
        "values": everything(engine),
        "kept": engine.offload.kept,
        "rest": (planned.of(Tier.DEVICE).rest, planned.of(Tier.DEVICE).counted_rest),
        "on the GPU": engine.offload.stored_bytes()[Tier.DEVICE],
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("clip", [0.0, 0.05], ids=["at once", "after the norm"])
def test_what_stays_on_the_gpu_has_the_bits_of_the_host_and_its_bytes_are_planned(
    ranks: Ranks, stage: int, clip: float
) -> None:
    sent = ranks.run(1, trained, BELOW, stage, clip)[0]
    found = ranks.run(1, trained, OPEN, stage, clip)[0]
    assert sent["kept"] == ()
    assert found["kept"] == tuple(f"layers.{number}" for number in range(7))
    assert found["on the GPU"] - sent["on the GPU"] == 7 * 64 * 64 * 10
    assert found["rest"][0] == found["rest"][1]
    for name, value in sent["values"].items():
        assert np.array_equal(found["values"][name], value), name
