"""A scene is a model and a way to get a loss from it, played plainly in one process and sharded over ranks.

The plain run averages the losses of the ranks' rows, so that everything that depends on a rank's own rows (experts,
branches) has an exact reference: parameters that no rank used have no gradient there either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwell
from tests.support.models import whole_parameters, zero

WIDTH = 6


class Scene:
    """What to override: `build` and `loss`; sometimes `options` (of AdamW) and `config`."""

    steps = 4
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}  # noqa: RUF012
    config: dict[str, Any] = {}  # noqa: RUF012

    def build(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, model: Callable[..., Any], x: Tensor, step: int) -> Tensor:
        return model(x).square().mean()

    def between(self, model: nn.Module, step: int) -> None:
        """Something that happens before a step's forward."""

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().double()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **self.options)

    def rows(self, num_ranks: int) -> list[list[Tensor]]:
        """For each step, the rows of each rank."""
        generator = torch.Generator().manual_seed(7)
        every = [torch.randn(4 * num_ranks, WIDTH, generator=generator, dtype=torch.float64) for _ in range(self.steps)]
        return [list(rows.chunk(num_ranks)) for rows in every]


def play_plainly(scene: Scene, num_ranks: int) -> dict[str, Tensor]:
    model = scene.make()
    optimizer = scene.optimizer(model)
    for step, rows in enumerate(scene.rows(num_ranks)):
        scene.between(model, step)
        optimizer.zero_grad()
        for own in rows:
            (scene.loss(model, own, step) / num_ranks).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def play_sharded(scene: Scene, stage: int) -> dict[str, Tensor]:
    model = scene.make()
    config = zero(stage, **scene.config)
    engine, *_ = shardwell.initialize(model=model, optimizer=scene.optimizer(model), config=config)
    for step, rows in enumerate(scene.rows(dist.get_world_size())):
        scene.between(model, step)
        scene.loss(engine, rows[dist.get_rank()].to(engine.device), step).backward()
        engine.step()
    return whole_parameters(model)


def play_all(scene: Scene, stages: tuple[int, ...]) -> list[dict[str, Tensor]]:
    return [play_sharded(scene, stage) for stage in stages]


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
