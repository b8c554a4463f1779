"""Tensors that ranks hold in parts: `PartitionedTensor`, and `reduce_scatter_coalesced`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwell.compat.deepspeed_api import comm
from shardwell.compat.deepspeed_api.runtime_names import partition_uniform

__all__ = ["PartitionedTensor", "reduce_scatter_coalesced"]


class PartitionedTensor:
    """A tensor of which each rank of a group has a part, of sizes that differ by one element at most."""

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Any = None) -> None:
        self.group = group
        self.num_parts, self.rank = comm.get_world_size(group), comm.get_rank(group)
        self.orig_size, self.orig_device = list(tensor.size()), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        first, last = self.partition[self.rank], self.partition[self.rank + 1]
        self.local_data = tensor.detach().reshape(-1)[first:last].clone()

    @classmethod
    def from_meta(cls, meta: Tensor, local_part: Tensor, group: Any, device: Any = None) -> PartitionedTensor:
        """Return the tensor that `to_meta` has described, with this rank's part of it."""
        numbers = meta.tolist()
        made = cls.__new__(cls)
        made.group, made.local_data = group, local_part.detach()
        made.orig_size = numbers[1 : 1 + numbers[0]]
        made.num_parts, made.rank, *made.partition = numbers[1 + numbers[0] :]
        made.orig_device = local_part.device if device is None else device
        found = comm.get_world_size(group), comm.get_rank(group)
        if (made.num_parts, made.rank) != found:
            raise AssertionError(f"the tensor is rank {made.rank} of {made.num_parts}, and this one is {found}")
        return made

    def full(self, device: Any = None) -> Tensor:
        """Return the whole tensor. All ranks of the group must call it."""
        longest = max(last - first for first, last in zip(self.partition, self.partition[1:], strict=False))
        mine = torch.zeros(longest, dtype=self.local_data.dtype, device=self.local_data.device)
        mine[: self.local_data.numel()] = self.local_data
        parts = [torch.empty_like(mine) for _ in range(self.num_parts)]
        comm.all_gather(parts, mine, group=self.group)
        sizes = [last - first for first, last in zip(self.partition, self.partition[1:], strict=False)]
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return whole.view(self.orig_size).to(self.orig_device if device is None else device)

    def to_meta(self) -> Tensor:
        """Return sizes and parts as numbers, for `from_meta`."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def data(self) -> Tensor:
        """Return this rank's part."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Return the size of this rank's part."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """Return the size of the whole tensor."""
        return self.orig_size


def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Average tensors over the ranks by one collective; return this rank's part of each, flat.

    A part has ceil(numel / ranks) elements; those of the last ranks may be shorter, or empty.
    """
    ranks, rank = comm.get_world_size(group), comm.get_rank(group)
    sizes = [math.ceil(tensor.numel() / ranks) for tensor in tensors]
    rows = []
    for tensor, size in zip(tensors, sizes, strict=True):
        flat = torch.nn.functional.pad(tensor.detach().reshape(-1), (0, size * ranks - tensor.numel()))
        rows.append(flat.view(ranks, size))
    joined = torch.cat(rows, dim=1).contiguous() / ranks
    mine = torch.empty(sum(sizes), dtype=joined.dtype, device=joined.device)
    comm.reduce_scatter_tensor(mine, joined.reshape(-1), group=group)
    parts = []
    for tensor, part in zip(tensors, mine.split(sizes), strict=True):
        left = max(min(tensor.numel() - rank * part.numel(), part.numel()), 0)
        parts.append(part[:left])
    return parts
