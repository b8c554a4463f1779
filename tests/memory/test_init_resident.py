"""What the system counts: a process that built its part of a model in `zero.Init` is as large as that part."""

from __future__ import annotations

import ctypes
import gc
import time

import torch
import torch.distributed as dist
from torch import nn

import shardwell
from tests.support.models import zero
from tests.support.ranks import Ranks

MIB = 1 << 20
LAYERS, LAYER = 12, 8 * MIB  # bytes


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1024, LAYER // 4096, bias=False) for _ in range(LAYERS)))


def grown(engine_before: bool) -> tuple[int, int, float]:
    """Bytes that the process has more after construction, those of its shards, and seconds."""
    dist.barrier()  # whatever links need is there
    if engine_before:  # which asks malloc to keep freed pages
        shardwell.initialize(model=nn.Linear(2, 2), config=zero(3))
    with shardwell.zero.Init(config=zero(3)):
        nn.Linear(2, 2)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed pages that are used again would not count
    before, began = resident(), time.perf_counter()
    with shardwell.zero.Init(config=zero(3)):
        model = build()
    after, seconds = resident(), time.perf_counter() - began
    assert len(list(model.parameters())) == LAYERS
    return after - before, LAYERS * LAYER // dist.get_world_size(), seconds


def test_a_process_grows_by_its_shards_and_one_module(ranks: Ranks) -> None:
    for engine_before in (False, True):
        for more, shards, _ in ranks.run(2, grown, engine_before):
            assert shards / 2 < more < shards + LAYER + 2 * MIB, (more / MIB, shards / MIB)
