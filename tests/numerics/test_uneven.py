"""Uneven data: ranks with fewer batches stand in until all are done, or the others hear who finished, and when."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.errors import ShardwellError
from tests.support.command import environment
from tests.support.models import whole_parameters, zero
from tests.support.patience import HANG
from tests.support.ranks import Ranks
from tests.support.training import distance

WIDTH, NUM_BATCHES = 6, (2, 5)  # of two ranks


class Normed(nn.Module):
    """Blocks behind a buffer that counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        for block in self.blocks:
            x = block(x)
        return x


def make() -> nn.Module:
    torch.manual_seed(0)
    return Normed().double()


def data(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(NUM_BATCHES[rank])]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def trained(stage: int, accumulation: int, by_all: bool) -> dict[str, Any]:
    model = make()
    config = zero(stage, gradient_accumulation_steps=accumulation, train_micro_batch_size_per_gpu=3)
    engine = shardwell.initialize(model=model, optimizer=optimizer_of(model), config=config).engine
    with engine.join(divide_by_initial_world_size=by_all):
        for x in data(dist.get_rank()):
            engine.backward(engine(x).square().sum())
            engine.step()
    return {**whole_parameters(model), "steps": engine.micro_steps, "count": float(model.count)}


def plainly(accumulation: int, by_all: bool) -> dict[str, Tensor]:
    model = make()
    optimizer = optimizer_of(model)
    rows = [data(0), data(1)]
    for number in range(max(NUM_BATCHES) // accumulation * accumulation):
        present = [own[number] for own in rows if number < len(own)]
        for x in present:
            (model(x).square().sum() / (2 if by_all else len(present)) / accumulation).backward()
        if (number + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("by_all", [True, False], ids=["over all ranks", "over ranks with data"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_without_data_stand_in_and_the_average_is_torchs(ranks: Ranks, stage: int, by_all: bool) -> None:
    accumulation = 1 + (stage + by_all) % 2  # each with each stage, and both ways
    expected = plainly(accumulation, by_all)
    for found, own in zip(ranks.run(2, trained, stage, accumulation, by_all), NUM_BATCHES, strict=True):
        assert found["steps"] == max(NUM_BATCHES)
        assert found["count"] == own, "a batch that is repeated counts once"
        difference, name = distance(found, expected)
        assert difference < 1e-12, f"accumulation {accumulation}: {name} differs by {difference}"


def without_any_batch(stage: int) -> str:
    model = make()
    engine = shardwell.initialize(model=model, optimizer=optimizer_of(model), config=zero(stage)).engine

    def loop() -> None:
        with engine.join():
            for x in data(1) if dist.get_rank() else []:
                engine.backward(engine(x).square().sum())
                engine.step()

    with pytest.raises(ShardwellError) as caught:
        loop()
    return str(caught.value)


def test_a_rank_without_any_batch_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    for words in ranks.run(2, without_any_batch, 3):
        assert "1 of 2 ranks had no batch at all" in words


def two_forwards() -> str:
    model = make()
    engine = shardwell.initialize(model=model, optimizer=optimizer_of(model), config=zero(1)).engine
    x = data(0)[0]
    with pytest.raises(ShardwellError) as caught, engine.join():
        engine.backward(engine(x).sum() + engine(x).sum())
    return str(caught.value)


def test_two_forwards_for_one_step_are_an_error_that_says_so(ranks: Ranks) -> None:
    for words in ranks.run(2, two_forwards):
        assert "two forwards with gradients before a step" in words


SCRIPT = """
import sys, torch, shardwell
from torch import nn
stage, num, how = int(sys.argv[1]), [int(n) for n in sys.argv[2].split(",")], sys.argv[3]
model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
engine = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=.1), config=config).engine
try:
    for _ in range(num[engine.global_rank]):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
except shardwell.ShardwellError as error:
    print("HEARD", type(error).__name__, str(error))
    raise SystemExit(3)
if how == "raises":
    raise ValueError("the data is broken")
if how == "destroys":
    engine.destroy(whole=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "how", "words"),
    [
        (2, "ends", "rank 1 finished after 3 batches"),
        (3, "destroys", "rank 1 finished after 3 batches"),
        (3, "raises", "rank 1 ended with ValueError (the data is broken) after 3 batches"),
    ],
)
def test_who_goes_on_hears_which_rank_ended_and_after_how_many_batches(
    tmp_path: Path, stage: int, how: str, words: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as a launcher has one
    variables = {
        **environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "SHARDWELL_DEVICE": "cpu", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(stage), "5,3", how],
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=HANG)[0] for process in processes]
    assert "HEARD PeerError" in said[0]
    assert words in said[0]
    assert ("engine.join()" in said[0]) == ("finished" in words)  # no number of batches helps where a rank raises
