"""A model that asks for values, which plans do not have; no test."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AskingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if x.sum().item() > 0:
            x = -x
        return x.sum()


def build() -> nn.Module:
    return AskingModel()


def number() -> int:
    return torch.get_num_threads()


def raises() -> nn.Module:
    """Raise what a careless function raises."""
    raise ValueError("no weights\nhere")


def empty() -> nn.Module:
    """Return a module without parameters."""
    return nn.Identity()


constant = 3
