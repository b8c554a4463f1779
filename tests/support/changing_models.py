"""A model that changes after `initialize`, what is put into it, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardwell

WIDTH, VOCAB = 6, 10
STAGES = (0, 1, 2, 3)
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def fresh(make: Callable[[], Any], seed: int = 9) -> Any:
    """A new module in fp64, the same wherever it is made."""
    torch.manual_seed(seed)
    made = make()
    return made.double() if isinstance(made, (nn.Module, Tensor)) else made


def build(**options: Any) -> Net:
    return fresh(lambda: Net(**options), 0)


def tokens(step: int, num_ranks: int, vocab: int = VOCAB) -> list[Tensor]:
    generator = torch.Generator().manual_seed(30 + step)
    return list(torch.randint(vocab, (num_ranks, 3, 4), generator=generator))


def train(engine: shardwell.Engine, steps: range) -> None:
    for step in steps:
        engine.backward(engine(tokens(step, engine.world_size)[engine.global_rank]))
        engine.step()


def at_all_stages(run: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    return [run(stage, *args, **kwargs) for stage in STAGES]


def more_rows(weight: Tensor, number: int = 3) -> Tensor:
    return torch.cat([weight.detach(), fresh(lambda: torch.randn(number, weight.shape[1]))])
