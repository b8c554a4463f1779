"""All of ZeRO++ together, on two nodes of two ranks: 1.5 bytes of each element that crosses, instead of 6."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.kernels.quantize import Codec
from shardwell.parallel import TrafficKind
from shardwell.parallel.traffic import BETWEEN, INSIDE
from shardwell.utils import safe_get_full_fp32_param
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.ranks import Ranks

ALL = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}


def trained(block: dict[str, Any], accumulation: int) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    torch.manual_seed(0)
    model = Gpt()
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
    for number, batch in enumerate(batches(20, 24)):
        for micro in range(accumulation):
            loss = engine(share(batch, rank, size, micro, accumulation))
            if number == 10 and micro == 0:  # with second copies of what was encoded in memory
                seen = whole_parameters(model)
                masters = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
            engine.backward(loss)
            engine.step()
        losses.append(float(loss))
    received = engine.traffic().received
    return {
        "losses": losses,
        "off": max(float((seen[n].float() - m).abs().max() / m.abs().max()) for n, m in masters.items()),
        "shards": [group.layout.shard_numel for unit in engine._scheduler.units for group in unit.groups],
        "gathered": [received[TrafficKind.GATHER, hop] for hop in (INSIDE, BETWEEN)],
        "reduced": [received[TrafficKind.REDUCE, hop] for hop in (INSIDE, BETWEEN)],
        "whole": whole_parameters(model),
    }


@pytest.mark.parametrize("accumulation", [1, 3])
def test_bytes_that_enter_a_node_and_what_is_learned(ranks: Ranks, accumulation: int) -> None:
    plain = ranks.run(4, trained, {}, accumulation)
    coded = ranks.run(4, trained, ALL, accumulation)
    eight, four = Codec("int8").num_bytes, Codec("int4").num_bytes
    for before, after in zip(plain, coded, strict=True):
        assert after["off"] <= 2**-8  # whoever looks sees bf16, not codes
        shards = after["shards"]
        # One gather of a step comes from the other node, in 8 bits; those after it from the copy in this node, in 16.
        assert after["gathered"][1] == sum(eight(s) for s in shards)
        later = 2 * accumulation - 1
        assert after["gathered"][0] == sum(2 * eight(s) + later * 2 * 2 * s for s in shards)
        assert after["reduced"][0] == accumulation * sum(eight(2 * s) for s in shards)
        assert after["reduced"][1] == accumulation * sum(four(s) for s in shards)
        assert before["gathered"][1] == 2 * accumulation * sum(2 * s for s in shards)
        assert before["reduced"][1] == accumulation * sum(2 * s for s in shards)
    assert coded[0]["losses"][-1] == pytest.approx(plain[0]["losses"][-1], rel=0.03)
    for other in coded[1:]:
        for name, value in coded[0]["whole"].items():
            assert (other["whole"][name] == value).all(), name


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(64, 64), nn.Linear(64, 64)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.frozen(x) + self.adapter(x))


def kept_whole() -> dict[str, Any]:
    """Frozen weights that were gathered in codes before it was decided that they may stay whole."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Adapted() for _ in range(3)])
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    config = zero(3, zero_optimization={**ALL, "stage3_param_persistence_threshold": 0}, shardwell={"keep_frozen": 0})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(4):
        if step == 1:
            engine._scheduler.keep_frozen(10**9)
        engine.backward(engine(torch.ones(2, 64) * dist.get_rank()).square().mean())
        engine.step()
    kept = [group.stays_whole for unit in engine._scheduler.units for group in unit.groups if not group.trainable]
    frozen = {name: p for name, p in whole_parameters(model).items() if name in before}
    return {"kept": kept, "same": all(torch.equal(torch.as_tensor(frozen[n]), before[n]) for n in before)}


def test_frozen_weights_that_stay_whole_are_those_that_rest(ranks: Ranks) -> None:
    for answer in ranks.run(4, kept_whole):
        assert answer == {"kept": [True] * 3, "same": True}


class Odd(nn.Module):
    """Numbers that no codec takes, and none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(16, 16), nn.Parameter(torch.empty(0, 4))
        self.codes = nn.Parameter(torch.arange(-64, 64, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.codes.float().mean() + self.empty.sum()


def odd() -> list[int]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Odd() for _ in range(2)])
    config = zero(3, zero_optimization={**ALL, "stage3_param_persistence_threshold": 0}, shardwell={"keep_frozen": 0})
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 16)).square().mean())
        engine.step()
    return whole_parameters(model)["1.codes"].tolist()


def test_what_no_codec_takes_travels_as_it_is(ranks: Ranks) -> None:
    assert ranks.run(2, odd) == [list(range(-64, 64))] * 2
