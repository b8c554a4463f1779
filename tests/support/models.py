"""Small models and loops that the tests share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Pre-norm attention and MLP, small enough to train in milliseconds."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)  # an odd size, so that shards cut through parameters
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Embedding, blocks, norm, head; returns the loss."""

    def __init__(
        self, width: int = 16, blocks: int = 3, vocab: int = 29, tied: bool = False, recompute: str = ""
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.randn(8, width) * 0.02)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("temperature", torch.ones(()))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(inputs) + self.position[: inputs.shape[1]]
        for block in self.blocks:
            if self.recompute and self.training:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        logits = self.head(self.norm(x)) * self.temperature.to(x.dtype)
        return F.cross_entropy(
            logits.flatten(0, 1).float() if logits.dtype == torch.bfloat16 else logits.flatten(0, 1), targets.flatten()
        )


def batches(num_steps: int, rows: int, vocab: int = 29, length: int = 9, seed: int = 1) -> list[Tensor]:
    """`num_steps` global batches; rank r of N takes its own consecutive rows of each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (rows, length), generator=generator) for _ in range(num_steps)]


def share(batch: Tensor, rank: int, num_ranks: int, micro: int = 0, num_micro: int = 1) -> Tensor:
    """This rank's rows of micro-step `micro`."""
    per_micro = batch.chunk(num_micro)[micro]
    return per_micro.chunk(num_ranks)[rank]


def zero(stage: int, **extra: Any) -> dict[str, Any]:
    """A configuration with everything sharded, however small."""
    config: dict[str, Any] = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    for key, value in extra.items():
        if isinstance(value, dict):
            config.setdefault(key, {}).update(value)
        else:
            config[key] = value
    return config


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, gathered where they are away."""
    import shardwell

    with shardwell.zero.GatheredParameters(model.parameters()):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
