"""Encoded all-gathers and reduce-scatters between ranks that pose as nodes."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwell
from shardwell.kernels.quantize import Codec
from tests.support.internals import collectives_of
from tests.support.models import Gpt, zero


def as_nodes(of: int) -> None:
    os.environ.update(LOCAL_WORLD_SIZE=str(of), LOCAL_RANK=str(dist.get_rank() % of))


def engine_with(block: dict[str, Any], stage: int = 3, bf16: bool = False, **others: Any) -> shardwell.Engine:
    torch.manual_seed(0)
    model = Gpt(blocks=2)
    config = zero(stage, zero_optimization=block, bf16={"enabled": bf16}, **others)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config).engine


def noise(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def moved(of: int, kinds: tuple[str, str, str], shard: int) -> dict[str, Any]:
    """A gather and two reduces of random numbers, and what they should be but for codes."""
    as_nodes(of)
    world = collectives_of(engine_with({}))
    weights, inside, between = (Codec(kind) for kind in kinds)
    rank, size = dist.get_rank(), dist.get_world_size()
    values = [noise(size * shard, r) for r in range(size)]
    mine = values[rank].to(world.device.torch_device)
    flat = torch.zeros_like(mine)
    flat.chunk(size)[world.shard_index].copy_(mine[:shard])
    world.all_gather(flat, "A", codec=weights).wait()
    into = torch.zeros_like(mine[:shard])
    world.reduce_scatter(mine.clone(), into, 0.5, False, "B", (inside, between)).wait()
    twice = into.clone()
    world.reduce_scatter(mine.clone(), twice, 0.5, True, "C", (inside, between)).wait()
    exact = torch.stack(values).sum(0).chunk(size)[world.shard_index] * 0.5
    return {"flat": flat.cpu(), "into": into.cpu(), "twice": twice.cpu(), "exact": exact, "place": world.shard_index}
