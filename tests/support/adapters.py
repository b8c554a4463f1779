"""A frozen matrix with an adapter, in one unit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, STEPS = 32, 4


class Adapted(nn.Module):
    """A frozen matrix with a small trainable detour, in one unit."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))
