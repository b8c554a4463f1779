"""Ranks that choose different paths among units: trained as in DDP at stages 0 to 2, and at stage 3 with one name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.engine.divergence_advice import divergence_advice
from shardwell.errors import ConfigError
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.training import distance

WIDTH, STEPS, NUM_RANKS = 6, 6, 2
# [micro-step][rank]: which blocks run. Ranks drop the first, the last, all but one, one that no rank runs, and none.
PATHS = [
    [[0, 1, 2, 3], [1, 2, 3]],
    [[0, 1, 2], [3]],
    [[0, 2], [2, 0]],
    [[0, 1, 2, 3], [0, 1, 2, 3]],
    [[1], [0, 2, 3]],
    [[3, 3, 1], [3, 0]],
]
HOST = {"offload_optimizer": {"device": "cpu"}}


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, path: list[int]) -> Tensor:
        for index in path:
            x = x + self.blocks[index](x)
        return self.head(x)


def make(kind: type[nn.Module] = Deep) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def data(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def trained(stage: int, accumulation: int, block: dict[str, Any], clears: bool) -> dict[str, Any]:
    model = make()
    config = zero(
        stage,
        zero_optimization=block,
        shardwell={"find_unused_parameters": True, "divergence_timeout": 5.0},
        gradient_accumulation_steps=accumulation,
        train_micro_batch_size_per_gpu=3,
    )
    engine = shardwell.initialize(model=model, optimizer=optimizer_of(model), config=config).engine
    rank = dist.get_rank()
    for step in range(STEPS):
        if clears and step % accumulation == 0:
            engine.backward(engine(data(7, rank), PATHS[step][rank]).sum())  # and thought better of it
            engine.zero_grad()
        engine.backward(engine(data(step, rank), PATHS[step][rank]).square().sum())
        engine.step()
    return whole_parameters(model)


def plainly(accumulation: int) -> dict[str, Tensor]:
    """What DDP with `find_unused_parameters` computes: what no rank has used is left alone."""
    model = make()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for rank in range(NUM_RANKS):
            loss = model(data(step, rank), PATHS[step][rank]).square().sum()
            (loss / NUM_RANKS / accumulation).backward()
        if (step + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("stage", "block", "clears"),
    [(0, {}, False), (1, {}, True), (2, {}, False), (2, {}, True), (2, HOST, False)],
    ids=["0", "1 and zero_grad", "2", "2 and zero_grad", "2 and host"],
)
def test_ranks_that_run_different_units_train_as_they_do_plainly(
    ranks: Ranks, stage: int, block: dict[str, Any], clears: bool, accumulation: int
) -> None:
    expected = plainly(accumulation)
    for found in ranks.run(NUM_RANKS, trained, stage, accumulation, block, clears):
        difference, name = distance(found, expected)
        limit = 1e-5 if block else 1e-10  # kernels on the host step in fp32
        assert difference < limit, f"{name} differs by {difference}"


class Chooser(nn.Module):
    """One of its experts, by the rank's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return self.experts[chosen](x)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.mixture = Chooser()

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return self.mixture(self.front(x), chosen)


def apart(stage: int, extra: dict[str, Any]) -> str:
    """Each rank runs an expert of its own; returns the error, if any."""
    model = make(Experts)
    config = zero(stage, shardwell={"divergence_timeout": 1.5})
    config["zero_optimization"]["leaf_module"] = {"names": [f"mixture.experts.{index}" for index in range(4)]}
    for block, keys in extra.items():
        config.setdefault(block, {}).update(keys)
    engine = shardwell.initialize(model=model, optimizer=optimizer_of(model), config=config).engine
    rank = dist.get_rank()
    try:
        for _ in range(2):
            engine.backward(engine(data(0, rank), rank).sum())
            engine.step()
    except shardwell.ShardwellError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [2, 3])
def test_pasting_what_the_error_says_makes_it_train(ranks: Ranks, stage: int) -> None:
    first = ranks.run(NUM_RANKS, apart, stage, {})
    words = next(answer for answer in first if "about to run" in answer)
    pasted = re.search(r"set (\{.*\})\.", words)
    assert pasted is not None, words
    if stage == 3:
        assert "'mixture' (Chooser)" in words
        assert json.loads(pasted[1]) == {"zero_optimization": {"leaf_module": {"classes": ["Chooser"]}}}
    assert ranks.run(NUM_RANKS, apart, stage, json.loads(pasted[1])) == ["", ""]


def test_the_module_to_name_has_a_forward_and_contains_both() -> None:
    model = nn.ModuleDict({"net": nn.Sequential(make(Experts), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))})
    words = divergence_advice(model, 3, "GATHER net.0.mixture.experts.1#1 exactly", "GATHER net.0.mixture.experts.2")
    assert "'net.0.mixture' (Chooser)" in words
    assert '"names": ["net"]' in divergence_advice(model, 3, "GATHER net.1.0", "REDUCE net.1.1")
    assert "the model itself chooses" in divergence_advice(make(), 3, "GATHER blocks.0", "GATHER blocks.1")
    assert "find_unused_parameters" in divergence_advice(make(), 1, "REDUCE blocks.0", "REDUCE blocks.1")
    assert "leaf_module" not in divergence_advice(make(), 3, "GATHER blocks.0", "NORM")


def test_stage_3_refuses_the_key_in_words() -> None:
    with pytest.raises(ConfigError, match=r"find_unused_parameters: true contradicts zero_optimization.stage 3"):
        shardwell.initialize(model=make(), config=zero(3, shardwell={"find_unused_parameters": True}))
