"""All of ZeRO++ together, on two nodes of two ranks: 1.5 bytes of each element that crosses, instead of 6."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.kernels.quantize import Codec
from tests.support.internals import groups_of, keep_frozen
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.zeropp import ALL, trained


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
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
            keep_frozen(engine, 10**9)
        engine.backward(engine(torch.ones(2, 64) * dist.get_rank()).square().mean())
        engine.step()
    kept = [group.stays_unsharded for group in groups_of(engine) if not group.trainable]
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
