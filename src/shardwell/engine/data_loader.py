"""The data loader that `initialize` returns for a data set: each rank gets its own share, shuffled every epoch.

The order of an epoch depends on the seed and the epoch alone. Its next `num_ranks * batch_size` samples are the next
micro-batch of all ranks, of which each rank takes its part. So the position in an epoch is one number, and training
resumes from it on any number of ranks and with any batch size, without a sample skipped or seen twice. Samples at the
end of an epoch that do not fill a micro-batch are dropped.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardwell.errors import CheckpointError, ShardwellError
from shardwell.runtime.pytree import to_device


class ShardedLoader:
    """Micro-batches of this rank, on the engine's device.

    A loop over the loader is one epoch. A new loop begins the next epoch, also after a `break`; only the first loop
    after `load_state_dict` resumes where the state was saved. An `IterableDataset` is read by each rank as it is: it
    determines its own order and shares, and its position is valid for the same number of ranks only.
    """

    epoch: int  # of the next batch
    position: int  # samples of this epoch that were returned: to all ranks; of an `IterableDataset`, to this rank

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        rank: int,
        num_ranks: int,
        device: torch.device,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.epoch = self.position = 0
        self.seed = seed
        self._dataset, self._collate = dataset, collate_fn
        self._batch_size, self._rank, self._num_ranks, self._device = batch_size, rank, num_ranks, device
        self.options: dict[str, Any] = {}  # of the torch loader that reads, such as the number of workers
        self.shuffles = True
        self._is_iterable = isinstance(dataset, IterableDataset)
        self._stride = batch_size if self._is_iterable else batch_size * num_ranks  # samples in a step of the position
        self._goes_on = False  # the state was just loaded
        self._loop = 0  # the number of the last loop that began, or that loading a state invalidated

    def __len__(self) -> int:
        """Return the number of batches of a full epoch."""
        return len(self._dataset) // self._stride  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        loop = self._loop
        for batch in self._batches():
            self.position += self._stride
            yield to_device(batch, self._device)
            if self._loop != loop:
                raise ShardwellError(
                    "the data loader went on with an earlier loop, although another began or its state was loaded; "
                    "take batches from the last one"
                )
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int | None]:
        """Return the position of the next batch, and what it depends on, as JSON values."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "samples": self._num_samples,
            "ranks": self._num_ranks,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume in the next loop where `state` was saved, or with the next epoch if the data set has changed."""
        self.check_state_dict(state)
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state["seed"]
        if self.position and state["samples"] != self._num_samples:
            was, now = ("a stream" if n is None else f"{n} samples" for n in (state["samples"], self._num_samples))
            warnings.warn(
                f"the data set was {was}, now it is {now}: its order is another, and the rest of epoch {self.epoch} "
                "cannot be told; going on with the next epoch",
                stacklevel=2,
            )
            self.epoch, self.position = self.epoch + 1, 0
        self._goes_on = True
        self._loop += 1

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise if `load_state_dict` would."""
        check_position(state)
        if self._is_iterable and state["position"] and state["ranks"] != self._num_ranks:
            raise CheckpointError(
                f"data loader: saved with {state['ranks']} rank(s), now there are {self._num_ranks}: an "
                "IterableDataset goes on at the same number only; use that, or a data set with indices"
            )

    @property
    def _num_samples(self) -> int | None:
        """The number of samples; None for a stream, which alone knows it."""
        return None if self._is_iterable else len(self._dataset)  # type: ignore[arg-type]

    def _begin(self) -> None:
        """Set where a loop starts."""
        num_samples = self._num_samples
        if num_samples is not None and num_samples < self._stride:
            raise ShardwellError(
                f"the data set has {num_samples} samples, fewer than the {self._stride} of one micro-batch "
                f"({self._num_ranks} rank(s) with {self._batch_size} each); use more data or smaller batches"
            )
        has_ended = num_samples is not None and self.position + self._stride > num_samples
        if has_ended or (self.position and not self._goes_on):
            self.epoch, self.position = self.epoch + 1, 0
        self._goes_on = False
        self._loop += 1

    def _batches(self) -> Iterator[Any]:
        """Return the batches of this epoch from the position on."""
        generator = torch.Generator().manual_seed(self._number())  # so that the user's random states do not change
        num_samples = self._num_samples
        options: dict[str, Any] = {"collate_fn": self._collate, "generator": generator, **self.options}
        if num_samples is None:
            if self.options.get("num_workers"):  # each worker reads its own stream, so batches are skipped
                stream = DataLoader(self._dataset, self._batch_size, drop_last=True, **options)
                return itertools.islice(iter(stream), self.position // self._batch_size, None)
            return iter(DataLoader(_Rest(self._dataset, self.position), self._batch_size, drop_last=True, **options))
        order = torch.randperm(num_samples, generator=generator) if self.shuffles else torch.arange(num_samples)
        return iter(DataLoader(self._dataset, batch_sampler=self._shares(order), **options))

    def _shares(self, order: torch.Tensor) -> Iterator[list[int]]:
        """Yield the samples of each batch of this rank."""
        for start in range(self.position, len(order) - self._stride + 1, self._stride):
            first = start + self._rank * self._batch_size
            yield order[first : first + self._batch_size].tolist()

    def _number(self) -> int:
        """Return a number that is unique for each seed and epoch."""
        text = f"{self.seed} {self.epoch}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def check_position(state: Mapping[str, Any]) -> None:
    """Raise unless the state is one that a loader saves."""
    for key in ("epoch", "position", "seed", "samples", "ranks"):
        value = state.get(key)
        if value is None and key == "samples":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or (value < 0 and key != "seed"):
            raise CheckpointError(f"data loader: {key}: expected a whole number, found {value!r}")


class _Rest(IterableDataset[Any]):
    """A stream without its first samples."""

    def __init__(self, dataset: Dataset[Any], num_gone: int) -> None:
        self._dataset, self._num_gone = dataset, num_gone

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._dataset), self._num_gone, None)
