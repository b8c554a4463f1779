"""The engine is its own cluster simulator: the same code on meta tensors, as one of very many ranks."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwell
from shardwell.kernels.quantize import Codec
from shardwell.parallel import TrafficKind
from shardwell.parallel.traffic import BETWEEN
from tests.support.internals import groups_of
from tests.support.models import zero
from tests.support.ranks import Ranks
from tests.support.wire_counter import WireCounter

WIDTH, BLOCKS, VOCAB = 8192, 48, 32_000


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.mix(y)) * self.up(y))


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().logsumexp(-1).mean()


def simulate(rank: int, num_ranks: int) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    with torch.device("meta"):
        model = Large()
    start = time.process_time()
    config = zero(3, bf16={"enabled": True}, optimizer={"type": "AdamW", "params": {"lr": 1e-4}})
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = 10**10
    config["zero_optimization"]["stage3_max_live_parameters"] = 10**11
    engine, *_ = shardwell.initialize(model=model, config=config)
    tokens = torch.zeros(1, 128, dtype=torch.long, device="meta")
    counter = WireCounter(rank, num_ranks)
    for step in range(2):
        if step == 1:
            counter.__enter__()
        engine.backward(engine(tokens))
        engine.step()
    counter.__exit__(None, None, None)
    groups = groups_of(engine)
    return {
        "seconds": time.process_time() - start,
        "numel": sum(group.layout.numel for group in groups),
        "padded": sum(group.layout.padded for group in groups),
        "payload": engine.traffic().total(),
        "control": engine.traffic().total(TrafficKind.CONTROL),
        "counted": sum(counter.received.values()),
        "memory": engine.memory().total(),
    }


@pytest.mark.slow
def test_a_stage_3_step_of_40b_parameters_as_rank_5_of_1024(ranks: Ranks) -> None:
    answer = ranks.run(1, simulate, 5, 1024)[0]
    assert 38e9 < answer["numel"] < 45e9
    assert answer["payload"] == 3 * 2 * answer["padded"] * 1023 // 1024
    assert answer["counted"] == answer["payload"] + answer["control"]
    assert abs(answer["memory"] - 12 * answer["numel"] / 1024) < 0.01 * 12 * answer["numel"] / 1024
    assert answer["seconds"] < 30


def simulate_nodes(rank: int, num_ranks: int, of: int, block: dict[str, Any]) -> dict[str, Any]:
    """Bytes of one step as one of the ranks of many nodes, and what its shards hold."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    os.environ.update(LOCAL_WORLD_SIZE=str(of), LOCAL_RANK=str(rank % of))
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    config = zero(3, zero_optimization=block, bf16={"enabled": True}, optimizer={"type": "AdamW", "params": {}})
    engine = shardwell.initialize(model=model, config=config).engine
    for _ in range(2):
        engine.backward(engine(torch.zeros(1, 512, device="meta")).sum())
        engine.step()
    found = engine.traffic().received
    shards = [group.layout.shard_numel for group in groups_of(engine)]
    return {
        "shards": shards,
        "between": {
            kind: found.get((kind, BETWEEN), 0) for kind in (TrafficKind.ALL_GATHER, TrafficKind.REDUCE_SCATTER)
        },
    }


def test_simulated_nodes_get_what_the_formula_of_two_hops_says(ranks: Ranks) -> None:
    num_ranks, of = 64, 8
    block = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": of}
    eight, four = Codec("int8").num_bytes, Codec("int4").num_bytes
    plain = ranks.run(1, simulate_nodes, 9, num_ranks, of, {})[0]
    coded = ranks.run(1, simulate_nodes, 9, num_ranks, of, block)[0]
    others = num_ranks // of - 1
    assert plain["between"][TrafficKind.ALL_GATHER] == 2 * others * sum(2 * s for s in plain["shards"])
    assert plain["between"][TrafficKind.REDUCE_SCATTER] == others * sum(2 * s for s in plain["shards"])
    assert coded["between"][TrafficKind.ALL_GATHER] == others * sum(eight(s) for s in coded["shards"])
    assert coded["between"][TrafficKind.REDUCE_SCATTER] == others * sum(four(s) for s in coded["shards"])
