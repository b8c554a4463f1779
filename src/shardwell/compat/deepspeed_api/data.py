"""`DeepSpeedDataLoader`: a loader of one rank's share of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


class DeepSpeedDataLoader:
    """Batches of one rank: a torch DataLoader with a sampler that shares the data set out over the ranks."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool = False,
        local_rank: int = 0,
        tput_timer: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Any = None,
    ) -> None:
        is_stream = isinstance(dataset, IterableDataset)
        if not is_stream and not hasattr(dataset, "__getitem__"):
            raise ValueError(
                f"expected a data set with indices or an IterableDataset, found a {type(dataset).__name__}"
            )
        if data_sampler is None and not is_stream:
            data_sampler = DistributedSampler(dataset, data_parallel_world_size, data_parallel_rank)
        self.dataset, self.batch_size, self.data_sampler = dataset, batch_size, data_sampler
        self.post_process_func: Callable[..., Any] | None = None
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size,
            sampler=data_sampler,
            pin_memory=pin_memory and torch.accelerator.is_available(),
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            drop_last=dataloader_drop_last,
        )
        self._epoch = 0
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> DeepSpeedDataLoader:
        set_epoch = getattr(self.data_sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._epoch)
        self._epoch += 1
        self._batches = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            iter(self)
        assert self._batches is not None
        batch = next(self._batches)
        return batch if self.post_process_func is None else self.post_process_func(batch, self.data_sampler)
