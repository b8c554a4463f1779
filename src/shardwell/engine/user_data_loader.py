"""The loader of an engine for a torch DataLoader that was passed to `initialize`.

If ranks can share its order (sequential, or shuffled), a `ShardedLoader` with its settings reads its data set. A
DataLoader with a sampler of its own is used as it is: the sampler decides what each rank sees.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from shardwell.config import Config
from shardwell.engine.data_loader import ShardedLoader, check_position
from shardwell.errors import CheckpointError, ConfigError
from shardwell.runtime.pytree import to_device

_TRAIN, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_OPTIONS = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")


def with_batch_of(given: DataLoader[Any], config: Config, num_ranks: int) -> tuple[int | None, Config]:
    """Return the batch size of the configuration, if it sets one; else a configuration with that of the loader."""
    origin = config.origins.get(_MICRO, "default")
    if origin != "default" and not origin.endswith("(default)"):
        return config.train_micro_batch_size_per_gpu, config
    if given.batch_size is None:
        return None, config
    train = given.batch_size * (config.gradient_accumulation_steps or 1) * num_ranks
    words = "batch_size of the DataLoader in training_data"
    origins = {**config.origins, _MICRO: words, _TRAIN: f"derived from {words}"}
    return None, config.with_origins(origins, {_MICRO: given.batch_size, _TRAIN: train})


def loader_like(
    given: DataLoader[Any],
    batch_size: int | None,
    rank: int,
    num_ranks: int,
    device: torch.device,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> ShardedLoader | UserDataLoader:
    """Return the loader of an engine for a DataLoader. `batch_size` is that of the configuration and has precedence."""

    def say(text: str, *values: Any) -> None:
        if rank == 0:
            logging.getLogger("shardwell").info("training_data is a DataLoader: " + text, *values)

    if not _can_be_shared(given):
        if collate_fn is not None:
            raise ConfigError("collate_fn: the DataLoader in training_data has its own; pass it there")
        batches = type(given.batch_sampler or given.sampler).__name__
        say("it is used as it is, and its %s decides which samples each rank gets", batches)
        return UserDataLoader(given, rank, num_ranks, device)
    mine = batch_size or given.batch_size or 1
    if given.batch_size != mine:
        say("batches have %d samples, as the configuration says, not its %s", mine, given.batch_size)
    loader = ShardedLoader(given.dataset, mine, rank, num_ranks, device, collate_fn or given.collate_fn)
    loader.options = {name: getattr(given, name) for name in _OPTIONS if getattr(given, name, None)}
    loader.shuffles = isinstance(given.sampler, RandomSampler)
    is_stream = isinstance(given.dataset, IterableDataset)
    say("its data set is %s", "read by each rank as it comes" if is_stream else "shared out over the ranks")
    if not given.drop_last:
        say("samples at the end of an epoch that fill no batch of every rank are dropped")
    return loader


def _can_be_shared(given: DataLoader[Any]) -> bool:
    """Return whether the order of the samples is known: all in sequence, or all shuffled."""
    if given.batch_size is None:
        return False  # batches come from a batch sampler, or from the data set itself
    if isinstance(given.dataset, IterableDataset):
        return True
    sampler = given.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(given.dataset)  # type: ignore[arg-type]
    return type(sampler) is SequentialSampler


class UserDataLoader:
    """Batches of a DataLoader as they are, on the engine's device. The position counts batches of this rank."""

    epoch: int
    position: int

    def __init__(self, loader: DataLoader[Any], rank: int, num_ranks: int, device: torch.device) -> None:
        self.epoch = self.position = 0
        self._loader, self._rank, self._num_ranks, self._device = loader, rank, num_ranks, device
        self._goes_on = False

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self.position and not self._goes_on:
            self.epoch, self.position = self.epoch + 1, 0
        self._goes_on = False
        for sampler in (self._loader.sampler, self._loader.batch_sampler):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
        for batch in itertools.islice(iter(self._loader), self.position, None):
            self.position += 1
            yield to_device(batch, self._device)
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int | None]:
        """Return the position of the next batch."""
        return {"epoch": self.epoch, "position": self.position, "seed": 0, "samples": None, "ranks": self._num_ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Skip the batches that were returned before in the next loop. The sampler must repeat its order."""
        self.check_state_dict(state)
        self.epoch, self.position = state["epoch"], state["position"]
        self._goes_on = True

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise if `load_state_dict` would."""
        check_position(state)
        if state["position"] and (state["ranks"] != self._num_ranks or state["samples"] is not None):
            raise CheckpointError(
                f"data loader: saved with {state['ranks']} rank(s) and another loader or number of ranks: a DataLoader "
                "with a sampler of its own goes on at the same number only"
            )
