"""Norms of gradients on this rank."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwell.memory import Device
from shardwell.optim.shards import Shard


def norm_of(shard: Shard) -> tuple[Tensor, bool]:
    """Of a shard's gradient; and whether every rank has the same."""
    gradient = shard.gradient
    assert gradient is not None
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dtype=wide), shard.group.row.gradients.over is None


def sum_of_squares(norms: list[Tensor], device: Device) -> Tensor:
    if not norms:
        return device.scalar(0.0, torch.float64)
    return torch.stack([norm.double() for norm in norms]).square().sum()
