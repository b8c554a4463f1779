"""Frozen parameters and buffers of one byte (fp8) are quantised values: no precision casts them, at any stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.zero import GatheredParameters, Init
from tests.support.ranks import Ranks

FP8 = torch.float8_e4m3fn


class Quantized(nn.Module):
    """A frozen fp8 weight with its scale, and a layer that trains."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 8), fill).to(FP8), requires_grad=False)
        self.register_buffer("scale", torch.full((8,), fill).to(FP8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) @ self.weight.to(x.dtype)
        return out


def train(stage: int, inside: bool) -> dict[str, Any]:
    """Return dtypes and values after a step; ranks begin with different values, of which those of rank 0 count."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    with Init(config_dict_or_path=config, enabled=inside):
        model = Quantized(2.0 + dist.get_rank())
    trained = list(model.layer.parameters())
    engine, *_ = shardwell.initialize(model=model, model_parameters=trained, config=config)
    engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).sum())
    engine.step()
    with GatheredParameters([model.weight]):
        found = {
            "dtypes": [str(one.dtype) for one in (model.weight, model.scale, model.layer.weight)],
            "weight": model.weight.float().unique().tolist(),
            "scale": model.scale.float().unique().tolist(),
            "norm": engine.get_global_grad_norm(),
        }
    engine.destroy(whole=False)
    return found


@pytest.mark.parametrize(("stage", "inside"), [(0, False), (2, False), (3, False), (3, True)])
def test_quantised_values_keep_their_dtype_and_are_those_of_rank_0(ranks: Ranks, stage: int, inside: bool) -> None:
    first, second = ranks.run(2, train, stage, inside)
    assert first == second
    assert first["dtypes"] == [str(FP8), str(FP8), "torch.bfloat16"]
    assert (first["weight"], first["scale"]) == ([2.0], [2.0])
    assert first["norm"] == pytest.approx(16.0 * 72**0.5, rel=1e-5)  # 64 weights and 8 biases with 8 x 2 each
