"""The loader that `initialize` returns for a data set: each rank its own share, shuffled anew every epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from shardwell.engine.inputs import moved


class ShardedLoader:
    """Micro-batches of this rank, on the engine's device."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        rank: int,
        num_ranks: int,
        device: torch.device,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.epoch = 0
        self._device = device
        self.sampler: DistributedSampler[Any] | None = None
        if not isinstance(dataset, IterableDataset):
            self.sampler = DistributedSampler(dataset, num_replicas=num_ranks, rank=rank, shuffle=True)
        self.loader: DataLoader[Any] = DataLoader(
            dataset, batch_size, sampler=self.sampler, collate_fn=collate_fn, drop_last=True
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.sampler is not None:
            self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        for batch in self.loader:
            yield moved(batch, self._device)
