"""Engines on a GPU: one rank on NCCL, or several that share it."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import shardwell
from tests.support.models import Gpt, batches, zero
from tests.support.training import Case, all_sharded


def on_the_gpu(cases: list[Case], stage: int) -> list[dict[str, Any]]:
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    torch.backends.cuda.matmul.allow_tf32 = False
    return all_sharded(cases, stage)


def nccl_engine(stage: int, **config: Any) -> tuple[shardwell.Engine, list[torch.Tensor]]:
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    torch.manual_seed(0)
    model = Gpt(width=64, blocks=4, vocab=160)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    config["shardwell"] = {"shard_at_world_one": True}
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, **config)).engine
    return engine, batches(6, 4, 160)
