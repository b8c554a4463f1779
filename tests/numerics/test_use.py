"""The shapes in which people use models: shared, unused, branching, reentered, looked at from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.ranks import Ranks
from tests.support.scenes import (
    WIDTH,
    Experts,
    FrozenAndThawed,
    GatedPerStep,
    GradientPenalty,
    Scene,
    SometimesUsed,
    Stack,
    UsedOutside,
    UsedOutsideRecomputed,
    layer,
    play_all,
    play_plainly,
)
from tests.support.training import distance


class Stacked(Scene):
    def build(self) -> nn.Module:
        return Stack()


class UnusedParameters(Scene):
    """One parameter of each block is never used: weight decay must not touch it."""

    def build(self) -> nn.Module:
        model = Stack()
        for block in model.blocks:
            block.unused = nn.Parameter(torch.randn(5))
        return model


class CalledTwice(Scene):
    def build(self) -> nn.Module:
        class Twice(Stack):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(torch.tanh(super().forward(x)))

        return Twice()


class AnotherOrder(Scene):
    """Prefetch guesses wrong in every step."""

    steps = 6

    def build(self) -> nn.Module:
        class Shuffled(Stack):
            def forward(self, x: Tensor, order: list[int]) -> Tensor:
                for index in order:
                    x = x + self.blocks[index](x)
                return x

        return Shuffled(4)

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        order = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3], [2, 0, 1], [0, 1, 2, 3], [3, 3, 0]][step]
        return model(x, order).square().mean()


class SeveralForwards(Scene):
    """Two forwards before one backward."""

    def build(self) -> nn.Module:
        return Stack()

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        return (model(x) * model(x.flip(0))).mean()


@dataclasses.dataclass
class Answer:
    loss: Tensor | None
    rest: dict[str, Any]
    nothing: None = None


class NestedOutputs(Scene):
    def build(self) -> nn.Module:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = layer()

            def forward(self, x: dict[str, Any]) -> dict[str, Any]:
                return {"x": [(x["x"][0][0] + self.inner(x["x"][0][0]), None)], "n": None}

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([Block() for _ in range(3)])

            def forward(self, x: Tensor) -> Answer:
                value: dict[str, Any] = {"x": [(x, None)]}
                for block in self.blocks:
                    value = block(value)
                return Answer(value["x"][0][0].square().mean(), value)

        return Model()

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        answer = model(x)
        assert answer.nothing is None
        return answer.loss


class TiedAcrossUnits(Scene):
    def build(self) -> nn.Module:
        model = Stack()
        model.blocks[2][0].weight = model.blocks[0][0].weight
        return model


class ExpertsInBlocks(Experts):
    """Without naming anything: a block is a unit, and its experts are inside."""

    config = {}  # noqa: RUF012


class ExpertsNobodyAsks(Scene):
    """A unit of experts only: in some steps a rank, or every rank, uses none of them."""

    steps = 6
    config = {"zero_optimization": {"leaf_module": {"classes": ["Bank"]}}}  # noqa: RUF012

    def build(self) -> nn.Module:
        class Bank(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.experts = nn.ModuleList([layer() for _ in range(3)])

            def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
                return x + sum((self.experts[index](x) for index in chosen), torch.zeros_like(x))

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.bank, self.last = layer(), Bank(), nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor, step: int) -> Tensor:
                x = self.first(x)
                rank = int(float(x.detach().sum()) > 0)  # by the rows: no two ranks have the same
                return self.last(self.bank(x, [[0], [], [2], [1, 2], [], [0, 1]][(step + 3 * rank) % 6]))

        return Model()

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        return model(x, step).square().mean()


class Detached(Scene):
    """A block whose input gets no gradient, and one whose output is dropped."""

    def build(self) -> nn.Module:
        class Cut(Stack):
            def forward(self, x: Tensor) -> Tensor:
                x = x + self.blocks[0](x)
                y = self.blocks[1](x.detach())
                self.blocks[2](x)
                return x + y

        return Cut()


SCENES = [
    Stacked, UnusedParameters, SometimesUsed, CalledTwice, AnotherOrder, SeveralForwards, NestedOutputs,
    GradientPenalty, UsedOutside, UsedOutsideRecomputed, TiedAcrossUnits, Experts, ExpertsInBlocks,
    ExpertsNobodyAsks, FrozenAndThawed,
    GatedPerStep, Detached,
]  # fmt: skip


@pytest.mark.parametrize("kind", SCENES, ids=lambda kind: kind.__name__)
def test_parameters_follow_plain_pytorch(ranks: Ranks, kind: type[Scene]) -> None:
    """At stage 3, where units are resharded, and at one of the others."""
    expected, stages = play_plainly(kind(), 2), (SCENES.index(kind) % 3, 3)
    for stage, found in zip(stages, ranks.run(2, play_all, kind(), stages)[0], strict=True):
        difference, name = distance(found, expected)
        assert difference < 1e-10, f"stage {stage}: {name} differs by {difference}"
