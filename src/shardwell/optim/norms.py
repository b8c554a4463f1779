"""Norms of gradients, on this rank and over all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardwell.memory import Device
from shardwell.optim.shards import Shard, Shards
from shardwell.unit import Context, Unit


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


class GlobalNorm:
    """The norm over all ranks. The same sum tells which parameters got a gradient on no rank."""

    def __init__(self, context: Context, shards: Shards) -> None:
        self._context, self._shards = context, shards
        self.unseen: set[str] = set()  # those, by name, at the last call
        self._all_seen: Tensor | None = None

    def __call__(self, units: Sequence[Unit], norms_of: Callable[[Unit], Iterator[tuple[Tensor, bool]]]) -> Tensor:
        """`norms_of` gives the norms of a unit's gradients on this rank, see `norm_of`."""
        split: list[Tensor] = []
        whole: list[Tensor] = []
        for unit in units:
            for norm, is_whole in norms_of(unit):
                (whole if is_whole else split).append(norm)
        seen = self._shards.seen()
        total = torch.cat([sum_of_squares(split, self._context.device).view(1), self._flags(seen)])
        self._context.world.sum_scalar(total, "NORM")
        self.unseen = set()
        if not all(seen) and not self._context.device.is_virtual:
            anywhere = total[1:].tolist()
            self.unseen = {name for name, number in self._shards.numbers.items() if not anywhere[number]}
        return (total[0] + sum_of_squares(whole, self._context.device)).sqrt()

    def _flags(self, seen: list[bool]) -> Tensor:
        """1D, a number for each parameter: did it get a gradient here?"""
        device = self._context.device.torch_device
        if not all(seen):
            return torch.tensor(seen, dtype=torch.float64, device=device)
        if self._all_seen is None or len(self._all_seen) != len(seen):
            self._all_seen = torch.ones(len(seen), dtype=torch.float64, device=device)
        return self._all_seen
