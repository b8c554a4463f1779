"""Parameters of any size and kind, units of any shape, two engines at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.training import distance


class Odd(nn.Module):
    """Everything that is not a plain contiguous matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.single = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.transposed = nn.Parameter(torch.randn(6, 5).t())
        self.strided = nn.Parameter(torch.randn(5, 12)[:, ::2])
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(5, 5), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(7))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(2)])

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = x @ self.transposed @ self.strided.t() @ self.frozen * self.scalar + self.single + self.empty.sum()
        for block in self.blocks:
            y = block(y)
        picture = self.conv(x.reshape(1, 2, 4, -1)[..., :5]).mean()
        return {"loss": (y.double() * self.wide).square().mean() + picture, "nothing": None, "nested": [(y,)]}


def data(num_steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(8, 5, generator=generator) for _ in range(num_steps)]


def train_odd(stage: int) -> dict[str, Tensor]:
    model = Odd().eval()
    engine, *_ = shardwell.initialize(
        model=model, optimizer=torch.optim.SGD, model_parameters=_groups(model), config=zero(stage)
    )
    for batch in data(4):
        engine.backward(engine(batch)["loss"])  # every rank the same rows: the average is the plain gradient
        engine.step()
    assert model.conv.weight.stride() == Odd().conv.weight.stride()
    return whole_parameters(model)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.requires_grad], "lr": 1e-3, "momentum": 0.9}]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_odd_parameters_keep_parity(ranks: Ranks, stage: int, num_ranks: int) -> None:
    model = Odd().eval()
    optimizer = torch.optim.SGD(_groups(model))
    for batch in data(4):
        optimizer.zero_grad()
        model(batch)["loss"].backward()
        optimizer.step()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for found in ranks.run(num_ranks, train_odd, stage):
        difference, name = distance(found, expected)
        assert difference < 1e-5, f"{name} differs by {difference}"


def loop(engine: shardwell.Engine, batch: Tensor) -> float:
    loss = engine(share(batch, dist.get_rank(), dist.get_world_size()))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def make(seed: int, stage: int) -> shardwell.Engine:
    torch.manual_seed(seed)
    model = Gpt()
    return shardwell.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=zero(stage)
    ).engine


def interleaved(stages: tuple[int, int]) -> bool:
    first, second = make(1, stages[0]), make(2, stages[1])
    together = [(loop(first, batch), loop(second, batch)) for batch in batches(3, 4)]
    one, two = make(1, stages[0]), make(2, stages[1])
    return together == [(loop(one, a), loop(two, b)) for a, b in zip(batches(3, 4), batches(3, 4), strict=True)]


@pytest.mark.parametrize("stages", [(3, 3), (1, 3)])
def test_two_engines_live_in_one_process(ranks: Ranks, stages: tuple[int, int]) -> None:
    assert ranks.run(2, interleaved, stages) == [True, True]


def evaluate_between_steps(stage: int) -> tuple[list[float], list[float]]:
    def run(evaluate: bool) -> list[float]:
        engine = make(1, stage)
        losses = []
        for batch in batches(3, 4):
            losses.append(loop(engine, batch))
            if evaluate:
                engine.eval()
                with torch.no_grad():
                    for other in batches(2, 4, seed=9):
                        engine(other)
                engine.train()
        return losses

    return run(False), run(True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_evaluation_between_steps_changes_nothing(ranks: Ranks, stage: int) -> None:
    plain, evaluated = ranks.run(2, evaluate_between_steps, stage)[0]
    assert plain == evaluated


def accumulate(stage: int, how: str) -> dict[str, Tensor]:
    """One optimizer step from four micro-batches, in several ways that must agree."""
    torch.manual_seed(0)
    model = Gpt(blocks=1).double()
    steps = 1 if how == "no_sync" else 4
    engine, *_ = shardwell.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config=zero(stage, gradient_accumulation_steps=steps, train_micro_batch_size_per_gpu=1),
    )
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for batch in batches(2, 24):
        for micro in range(4):
            rows = share(batch, rank, num_ranks, micro, 4)
            if how == "no_sync":
                if micro < 3:
                    with engine.no_sync():
                        (engine(rows) / 4).backward()
                else:
                    (engine(rows) / 4).backward()
                    engine.step()
            elif how == "divided by hand":
                engine.backward(engine(rows) / 4, scale_wrt_gas=False)
                engine.step()
            elif how == "boundary by hand":
                engine.set_gradient_accumulation_boundary(micro == 3)
                engine.backward(engine(rows))
                assert engine.is_gradient_accumulation_boundary() is (micro == 3)
                engine.step()
            else:
                engine.backward(engine(rows))
                engine.step()
    assert engine.global_steps == 2
    return whole_parameters(model)


WAYS = ("counted", "no_sync", "divided by hand", "boundary by hand")


def accumulate_all(stage: int) -> list[dict[str, Tensor]]:
    return [accumulate(stage, how) for how in WAYS]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ways_to_accumulate_agree(ranks: Ranks, stage: int) -> None:
    counted, *others = ranks.run(2, accumulate_all, stage)[0]
    expected = {key: torch.as_tensor(value) for key, value in counted.items()}
    for how, other in zip(WAYS[1:], others, strict=True):
        difference, name = distance(other, expected)
        assert difference < 1e-12, f"{how}: {name} differs by {difference}"
