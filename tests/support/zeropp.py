"""A small model that is trained with all of ZeRO++."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import shardwell
from shardwell.parallel import TrafficKind
from shardwell.parallel.traffic import BETWEEN, INSIDE
from shardwell.utils import safe_get_full_fp32_param
from tests.support.internals import groups_of
from tests.support.models import Gpt, batches, share, whole_parameters, zero

ALL = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}


def trained(block: dict[str, Any], accumulation: int) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    torch.manual_seed(0)
    model = Gpt(blocks=2)
    config = zero(
        3,
        zero_optimization={**block, "stage3_param_persistence_threshold": 0},
        bf16={"enabled": True},
        gradient_accumulation_steps=accumulation,
        train_micro_batch_size_per_gpu=1,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    losses, seen = [], {}
    for number, batch in enumerate(batches(6, 24)):
        for micro in range(accumulation):
            loss = engine(share(batch, rank, size, micro, accumulation))
            if number == 3 and micro == 0:  # with second copies of what was encoded in memory
                seen = whole_parameters(model)
                masters = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
            engine.backward(loss)
            engine.step()
        losses.append(float(loss))
    received = engine.traffic().received
    return {
        "losses": losses,
        "off": max(float((seen[n].float() - m).abs().max() / m.abs().max()) for n, m in masters.items()),
        "shards": [group.layout.shard_numel for group in groups_of(engine)],
        "gathered": [received[TrafficKind.ALL_GATHER, hop] for hop in (INSIDE, BETWEEN)],
        "reduced": [received[TrafficKind.REDUCE_SCATTER, hop] for hop in (INSIDE, BETWEEN)],
        "whole": whole_parameters(model),
    }
