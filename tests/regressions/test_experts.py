"""Pain: a mixture of experts, or any control flow that depends on a rank's data, hangs at stage 3."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.utils import safe_get_local_fp32_param
from tests.support import zoo
from tests.support.models import zero
from tests.support.patience import soon
from tests.support.ranks import Ranks
from tests.support.scenes import WIDTH, Scene, play_all, play_plainly
from tests.support.training import distance

LIMIT = 1.5  # seconds until ranks that wait for each other compare what they are doing


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class Mixture(nn.Module):
    """A rank's rows choose one of the experts; the others are not called at all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([expert() for _ in range(4)])

    def forward(self, x: Tensor, shift: int) -> Tensor:
        chosen = (shift + (0 if x[0, 0] > 0 else 1)) % len(self.experts)
        return x + self.experts[chosen](x) * self.gate(x).sigmoid()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixtures = nn.ModuleList([Mixture() for _ in range(2)])

    def forward(self, x: Tensor, shift: int) -> Tensor:
        sign = x[:, :1]  # stays what it is, so that the ranks never agree on an expert
        for mixture in self.mixtures:
            x = torch.cat([sign, mixture(x, shift)[:, 1:]], 1)
        return x


class Diverging(Scene):
    """In every step the two ranks use different experts, and some experts are used by no rank."""

    steps = 6

    def __init__(self, leaf: dict[str, list[str]] | None = None) -> None:
        self.config = {"zero_optimization": {"leaf_module": leaf}} if leaf else {}

    def build(self) -> nn.Module:
        return Model()

    def loss(self, model: Any, x: Tensor, step: int) -> Tensor:
        return model(x, step).square().mean()

    def rows(self, num_ranks: int) -> list[list[Tensor]]:
        every = super().rows(num_ranks)
        for rows in every:
            for rank, own in enumerate(rows):
                own[:, 0] = 1.0 if rank % 2 == 0 else -1.0
        return every


@pytest.mark.parametrize("leaf", [{"classes": ["Mixture"]}, {"name_suffixes": ["0", "1"]}, None], ids=str)
def test_ranks_that_use_different_experts_of_one_unit_train_as_they_do_plainly(ranks: Ranks, leaf: Any) -> None:
    """Experts that a rank skips cause a hang; here the module that chooses is one unit, named or found."""
    scene = Diverging(leaf)
    expected = play_plainly(scene, 2)
    for stage, found in zip((1, 2, 3), ranks.run(2, play_all, scene, (1, 2, 3))[0], strict=True):
        difference, name = distance(found, expected)
        assert difference < 1e-10, f"stage {stage}: {name} differs by {difference}"


def run_apart(warm_up: int) -> dict[str, Any]:
    """Each expert is a unit. After some steps with the same expert on both ranks they use different ones."""
    torch.manual_seed(0)
    model = Mixture()
    config = zero(3, shardwell={"divergence_timeout": LIMIT})
    config["zero_optimization"]["leaf_module"] = {"names": [f"experts.{index}" for index in range(4)]}
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    x = torch.ones(3, WIDTH)
    for _ in range(warm_up):
        engine.backward(engine(x, 0).square().mean())
        engine.step()
    before = [safe_get_local_fp32_param(parameter) for parameter in model.parameters()]
    start = time.monotonic()
    try:
        engine.backward(engine(x if dist.get_rank() == 0 else -x, 0).square().mean())
        engine.step()
    except Exception as error:
        after = [safe_get_local_fp32_param(parameter) for parameter in model.parameters()]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True) if a is not None)
        return {"error": type(error).__name__, "text": str(error), "same": same, "seconds": time.monotonic() - start}
    return {"error": ""}


@pytest.mark.parametrize("warm_up", [0, 1, 5], ids=["first step", "second step", "sixth step"])
def test_ranks_that_use_different_units_get_an_error_with_names_and_no_hang(ranks: Ranks, warm_up: int) -> None:
    """Diverging ranks hang until a timeout of half an hour, and nobody learns where."""
    for answer in ranks.run(2, run_apart, warm_up):
        assert answer["error"] == "DivergenceError"
        assert "experts." in answer["text"]
        assert "rank 0" in answer["text"] or "rank 1" in answer["text"]
        assert "leaf_module" in answer["text"]
        assert answer["seconds"] < soon(LIMIT + 8)
        assert answer["same"]


def train_out_of_the_box(name: str) -> zoo.Run:
    return zoo.train_sharded(zoo.disturb(zoo.build(name)), name, 3)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_published_mixtures_train_out_of_the_box(ranks: Ranks, name: str) -> None:
    """Such models hang unless the right class is named; here nothing has to be named."""
    plain = zoo.train_plainly(zoo.disturb(zoo.build(name)), name)
    zoo.check(ranks.run(2, train_out_of_the_box, name), plain)
