"""A scene is a model and a way to get a loss from it, played plainly in one process and sharded over ranks.

The plain run averages the losses of the ranks' rows, so that everything that depends on a rank's own rows (experts,
branches) has an exact reference: parameters that no rank used have no gradient there either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
