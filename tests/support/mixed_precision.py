"""A model for training in mixed precision, its rows, its loss and its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwell
from tests.support.models import zero

WIDTH, STEPS = 7, 3
STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, each of them a unit; `recompute` checkpoints them."""

    def __init__(self, blocks: int = 3, recompute: str = "", width: int = WIDTH) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant") if self.recompute else block(x)
        return x


def build(kind: Callable[..., nn.Module] = Net, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options)


def rows(steps: int, num_ranks: int, accumulation: int = 1) -> list[list[list[Tensor]]]:
    """[step][micro-step][rank]; sizes are such that gradients are far from fp16's smallest numbers."""
    generator = torch.Generator().manual_seed(3)
    every = [torch.randn(accumulation, num_ranks, 4, WIDTH, generator=generator) for _ in range(steps)]
    return [[list(micro) for micro in step] for step in every]


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().sum()


def initialize(model: nn.Module, stage: int, **config: Any) -> shardwell.Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, **config)).engine
