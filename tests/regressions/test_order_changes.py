"""Pain: the prefetcher learns an order of modules in the first step and fails when a later step uses another."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell.engine import TraceAction
from shardwell.sharding.released import ReleasedParameter
from tests.support.models import zero
from tests.support.ranks import Ranks
from tests.support.scenes import WIDTH, Scene, play_all, play_plainly
from tests.support.training import distance

BLOCKS = 5


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)])

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = x + self.blocks[index](x)
        return x.square().mean()


def orders(num_steps: int, seed: int = 0) -> list[list[int]]:
    """Layer dropout, repetition and any order, the same on every rank; the first step is the plain order."""
    dice = random.Random(seed)
    return [list(range(BLOCKS)), *(dice.choices(range(BLOCKS), k=dice.randint(1, 7)) for _ in range(num_steps - 1))]


class Shuffled(Scene):
    steps = 12

    def build(self) -> nn.Module:
        return Stack()

    def loss(self, model: Any, x: Tensor, step: int) -> Tensor:
        order = orders(self.steps)[step]
        with torch.no_grad():  # an evaluation in yet another order comes between
            model(x, order[::-1])
        return model(x, order)


@pytest.mark.parametrize("limit", ["stage3_prefetch_bucket_size", "stage3_max_reuse_distance"])
def test_modules_may_run_in_another_order_in_every_step(ranks: Ranks, limit: str) -> None:
    """A changed order invalidates the trace and training stops; here a wrong guess only costs time."""
    scene = Shuffled()
    scene.config = {"zero_optimization": {limit: 10_000}}
    expected = play_plainly(scene, 2)
    for stage, found in zip((2, 3), ranks.run(2, play_all, scene, (2, 3))[0], strict=True):
        difference, name = distance(found, expected)
        assert difference < 1e-10, f"stage {stage}: {name} differs by {difference}"


def gathers_of_steps() -> list[dict[str, Any]]:
    """For each step: how often units were gathered, how many were used, and what is still whole afterwards."""
    torch.manual_seed(0)
    model = Stack()
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=zero(3))
    found = []
    for order in [*orders(8), [4, 2, 0], [4, 2, 0], [4, 2, 0]]:
        with engine.record() as trace:
            engine.backward(engine(torch.ones(2, WIDTH), order))
            engine.step()
        away = sum(isinstance(parameter, ReleasedParameter) for parameter in model.parameters())
        found.append({"gathers": trace.count(TraceAction.ALL_GATHER), "calls": len(order), "away": away})
    return found


def test_wrong_guesses_are_released_and_unlearned(ranks: Ranks) -> None:
    """What was fetched by mistake stays in memory; here it is away after the step, and a new order is learned."""
    for steps in ranks.run(2, gathers_of_steps):
        assert all(step["away"] == 2 * BLOCKS for step in steps)
        assert all(step["gathers"] <= 2 * step["calls"] + BLOCKS for step in steps)
        assert steps[-1]["gathers"] == 2 * 3
