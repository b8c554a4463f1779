"""Pipelines together with tensor parallelism and ZeRO: three axes, on eight ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwell
from tests.support.pipelines import Decoder, next_token_loss, pipeline_config, plain, stream
from tests.support.ranks import Ranks

STEPS = 8
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def made() -> torch.nn.Module:
    torch.manual_seed(0)
    return Decoder(2, tied=True).double()


def trained(config: dict[str, Any]) -> dict[str, Any]:
    """Train; return the losses and norms of this rank."""
    model = shardwell.pipeline.split(made(), loss_fn=next_token_loss)
    engine, *_ = shardwell.initialize(model=model, config=config)
    batches = stream(STEPS, engine.data_rank)
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(float(engine.train_batch(batches)))
        norms.append(engine.get_global_grad_norm())
    found = {"losses": losses, "norms": norms, "parameters": engine.state_dict()}
    engine.destroy(whole=False)
    return found


def train_stages() -> list[dict[str, Any]]:
    tensor = {"tensor_parallel": {"autotp_size": 2, "plan": PLAN}}
    return [trained(pipeline_config(stage, "1f1b", **tensor)) for stage in (1, 3)]


@pytest.mark.slow
def test_three_axes_follow_plain_pytorch(ranks: Ranks) -> None:
    expected = plain(made(), STEPS, data_size=2)
    for found in ranks.run(8, train_stages):
        for one in found:
            assert one["losses"] == pytest.approx(expected["losses"], abs=1e-10)
            assert one["norms"] == pytest.approx(expected["norms"], abs=1e-10)
            for name, value in one["parameters"].items():
                want = expected["parameters"].get(name)
                assert want is None or abs(torch.as_tensor(value) - want).max() < 1e-10, name
