"""The shapes in which people use models: shared, unused, branching, reentered, looked at from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import Ranks
from tests.support.scenes import WIDTH, Scene, play_all, play_plainly
from tests.support.training import distance

STAGES = (0, 1, 2, 3)


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Tanh(), nn.Linear(2 * WIDTH + 1, WIDTH))


class Stack(nn.Module):
    """Blocks in a list, so that each is a unit."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([layer() for _ in range(num_blocks)])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return x


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


class SometimesUsed(Scene):
    """A parameter that is used in some steps only keeps its own count of steps in AdamW."""

    steps = 6

    def build(self) -> nn.Module:
        class Sometimes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.always, self.odd = layer(), nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor, use: bool) -> Tensor:
                return self.always(x) + (self.odd(x) if use else 0)

        class Holder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([Sometimes() for _ in range(2)])

            def forward(self, x: Tensor, use: bool) -> Tensor:
                for block in self.blocks:
                    x = block(x, use)
                return x

        return Holder()

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        return model(x, step % 2 == 1).square().mean()


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


class GradientPenalty(Scene):
    """Double backward: the gradient of the output by the input is part of the loss."""

    def build(self) -> nn.Module:
        return Stack()

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        return out.square().mean() + (grad.norm(dim=1) - 1).square().mean()


class UsedOutside(Scene):
    """The weights of one block are used by another module, by the root and by the loss."""

    def build(self) -> nn.Module:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(WIDTH, WIDTH)
                self.deep = layer()
                self.other: list[nn.Module] = []

            def forward(self, x: Tensor) -> Tensor:
                for other in self.other:
                    x = x @ other.inner.weight.t() + other.inner.bias
                return x + self.deep(self.inner(x))

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([Block() for _ in range(3)])
                self.blocks[2].other.append(self.blocks[0])

            def forward(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = block(x)
                return F.linear(x, self.blocks[1].inner.weight)

        return Model()

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        out = model(x)
        module = getattr(model, "module", model)
        return out.square().mean() + 0.1 * (x @ module.blocks[0].inner.weight).square().mean()


class UsedOutsideRecomputed(UsedOutside):
    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        x = x.clone().requires_grad_()
        return checkpoint(
            lambda rows: super(UsedOutsideRecomputed, self).loss(model, rows, step), x, use_reentrant=False
        )


class TiedAcrossUnits(Scene):
    def build(self) -> nn.Module:
        model = Stack()
        model.blocks[2][0].weight = model.blocks[0][0].weight
        return model


class Experts(Scene):
    """Each rank uses the experts that its rows choose; the block is named as one unit."""

    steps = 6
    config = {"zero_optimization": {"leaf_module": {"classes": ["Mixture"]}}}  # noqa: RUF012

    def build(self) -> nn.Module:
        class Mixture(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate = nn.Linear(WIDTH, 8)
                self.experts = nn.ModuleList([layer() for _ in range(8)])

            def forward(self, x: Tensor) -> Tensor:
                scores = self.gate(x).softmax(-1)
                best = scores.argmax(-1)
                out = torch.zeros_like(x)
                for index, expert in enumerate(self.experts):
                    rows = (best == index).nonzero().flatten()
                    if len(rows):
                        out = out.index_add(0, rows, expert(x[rows]) * scores[rows, index, None])
                return x + out

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([nn.Sequential(Mixture(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)])

            def forward(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = block(x)
                return x

        return Model()


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


class FrozenAndThawed(Scene):
    """Blocks are frozen and thawed between steps."""

    steps = 8

    def build(self) -> nn.Module:
        model = Stack(3)
        model.blocks[0].requires_grad_(False)
        model.blocks[1][0].bias.requires_grad_(False)
        return model

    def between(self, model: nn.Module, step: int) -> None:
        model.blocks[0].requires_grad_(step in (2, 3, 6))
        model.blocks[1][0].bias.requires_grad_(step >= 4)
        model.blocks[2].requires_grad_(step != 5)


class GatedPerStep(Scene):
    """GAN style: half of the model is frozen in turn."""

    steps = 6

    def build(self) -> nn.Module:
        return Stack(4)

    def between(self, model: nn.Module, step: int) -> None:
        for index, block in enumerate(model.blocks):
            block.requires_grad_(index % 2 == step % 2)


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
    expected = play_plainly(kind(), 2)
    for stage, found in zip(STAGES, ranks.run(2, play_all, kind(), STAGES)[0], strict=True):
        difference, name = distance(found, expected)
        assert difference < 1e-10, f"stage {stage}: {name} differs by {difference}"
