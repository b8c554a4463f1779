"""A model with all that a checkpoint can hold: tied and frozen weights, buffers, an odd order, an empty parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwell
from tests.support.models import zero


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.shift = nn.Parameter(torch.linspace(-1, 1, 7), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.embedding(tokens) * self.scale.to(self.embedding.weight.dtype) + self.shift[:6]
        for block in self.blocks:
            x = x + block(x)
        picture = x[:, :2].reshape(-1, 3, 2, 2)
        x = x + self.conv(picture).sum() * 0.1
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens.flatten())


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.dim() == 1], "weight_decay": 0.0},
    ]


def trained(stage: int, steps: int = 3, **config: Any) -> shardwell.Engine:
    """An engine after some steps, on the ranks that call it."""
    model = Odd()
    optimizer = torch.optim.AdamW(two_groups(model), lr=0.01, betas=(0.8, 0.95))
    merged = zero(stage, **{"shardwell": {"shard_at_world_one": True}, **config})
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=merged, device="cpu").engine
    generator = torch.Generator().manual_seed(engine.global_rank)
    for _ in range(steps):
        engine.backward(engine(torch.randint(11, (2, 4), generator=generator)))
        engine.step()
    return engine


CLIENT = {"epoch": 2, "best": [0.5, None], "pair": (1, 2), "note": "mine", "numbers": torch.arange(3)}


def save(root: Path, stage: int, **config: Any) -> None:
    """Train and save a checkpoint."""
    trained(stage, **config).save_checkpoint(root, client_state=CLIENT)
