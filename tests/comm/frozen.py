"""Adapters around frozen weights that rest in codes: the model, an engine of it, and its codes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.kernels.quantize import Codec
from shardwell.kernels.quantize_stably import quantize_stably
from tests.models import zero

WIDTH, ROWS = 44, 8  # of a width that blocks of 256 do not divide
ON = {"zero_quantized_nontrainable_weights": True}


class Adapted(nn.Module):
    """Frozen matrices with a small detour that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.requires_grad_(False)
        self.out.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.base(x) + self.up(self.down(x))))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Adapted() for _ in range(3)])


def start(
    model: nn.Module | None = None, *, kind: str = "int8", block: dict[str, Any] | None = None, **others: Any
) -> shardwell.Engine:
    model = model or build()
    own = {"codecs": {"frozen": kind}, "keep_frozen": 0, **others.pop("shardwell", {})}
    config = zero(3, zero_optimization={**ON, **(block or {})}, shardwell=own, **others)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config).engine


def rows(step: int, rank: int, num_ranks: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(num_ranks)[rank]


def step(engine: shardwell.Engine, number: int) -> Tensor:
    output = engine(rows(number, dist.get_rank(), dist.get_world_size()).to(engine.device))
    engine.backward(output.float().square().mean())
    engine.step()
    return output.detach()


def groups(engine: shardwell.Engine, frozen: bool) -> list[Any]:
    return [group for unit in engine._scheduler.units for group in unit.groups if group.trainable is not frozen]


def all_codes(engine: shardwell.Engine) -> list[Tensor]:
    return [group.storage.parameters.clone() for group in groups(engine, frozen=True)]


def coded(engine: shardwell.Engine, original: nn.Module, kind: str) -> nn.Module:
    """A plain model whose frozen weights went through the codec, shard by shard."""
    model, codec, values = copy.deepcopy(original), Codec(kind), dict(original.named_parameters())
    plain = dict(model.named_parameters())
    for group in groups(engine, frozen=True):
        layout = group.layout
        flat = torch.zeros(layout.padded)
        for slot in layout.slots:
            flat[slot.offset : slot.end] = values[slot.name].detach().flatten()
        for shard in flat.chunk(layout.num_shards):
            codes = torch.empty(codec.num_bytes(shard.numel()), dtype=torch.uint8)
            quantize_stably(codec, shard.clone(), codes)
            codec.decode(codes, shard)
        for slot in layout.slots:
            plain[slot.name].data.copy_(flat[slot.offset : slot.end].view(slot.shape))
    return model


def same_tensors(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
