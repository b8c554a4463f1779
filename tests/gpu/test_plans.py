"""The prediction of a running job on CUDA: the allocator's peak, and a stage that memory chooses."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import shardwell
from shardwell.memory import Tier
from shardwell.plan.decoder import Decoder, DecoderSizes
from tests.support.internals import memory_stats_of

pytestmark = pytest.mark.gpu

SIZES = DecoderSizes(8, 512, 8, 4096, mlp=1024, kv_heads=4, gated=True)


def config(zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **more,
    }


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 3}, {"stage": 3, "offload_optimizer": {"device": "cpu"}}])
def test_the_peak_of_the_allocator_is_predicted(zero: dict[str, Any], recomputes: bool) -> None:
    gc.collect()  # what earlier tests left is on the GPU, too
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    engine = shardwell.initialize(model=Decoder(SIZES, recomputes=recomputes), config=config(zero)).engine
    tokens = torch.randint(0, 4096, (2, 1024), device=engine.device)
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        memory_stats_of(engine).reset_peak()
        engine.backward(engine(tokens))
        engine.step()
    engine.optimizer.settle()
    found = engine.plan((tokens,)).of(Tier.DEVICE)
    assert found.rest == found.counted_rest
    assert found.counted_allocated is not None
    assert found.allocated == pytest.approx(found.counted_allocated - before, rel=0.02)


def test_a_stage_is_chosen_by_the_memory_of_the_gpu() -> None:
    large = shardwell.initialize(model=Decoder(SIZES), config=config({"stage": "auto"})).engine
    assert large.zero_optimization_stage() == 0
    size = sum(parameter.numel() for parameter in large.module.parameters())
    assert not any(place.depth for place in large.offload.places.values())
    small = config({"stage": "auto"}, shardwell={"memory": {"device": 7 * size}})
    engine = shardwell.initialize(model=Decoder(SIZES), config=small).engine
    assert any(place.optimizer is Tier.HOST for place in engine.offload.places.values())
