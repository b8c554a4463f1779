"""A model of matrices, stacks and vectors for optimizers to step, plainly and over shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwell

WIDTH, STEPS = 6, 3
STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.stack = nn.Parameter(torch.randn(3, 2 * WIDTH + 1, WIDTH) / 4)
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.tanh(self.up(self.norm(x))) @ self.stack).sum(0)


class Net(nn.Module):
    """Two blocks and a head; odd sizes, so that shards cut through parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def build(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def rows(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(11 + step)
    return torch.randn(12, WIDTH, generator=generator, dtype=torch.float64).to(dtype)  # divides by 1, 2 and 3 ranks


def own(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return rows(step, dtype).chunk(dist.get_world_size())[dist.get_rank()]


def train(engine: shardwell.Engine, steps: range = range(STEPS), dtype: torch.dtype = torch.float64) -> None:
    for step in steps:
        engine.backward(engine(own(step, dtype)))
        engine.step()


def train_plainly(model: nn.Module, optimizer: Optimizer, steps: range = range(STEPS)) -> dict[str, Tensor]:
    for step in steps:
        optimizer.zero_grad()
        model(rows(step, next(model.parameters()).dtype)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def groups_of(model: nn.Module, rate: float, **options: Any) -> list[dict[str, Any]]:
    """Two parameter groups with rates of their own."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, **options, "lr": rate}, {"params": rest, **options, "lr": rate / 2}]
