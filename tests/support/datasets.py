"""Data sets of numbers, by index and as streams."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Dataset, IterableDataset

CPU = torch.device("cpu")


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Counts from `start` on."""

    def __init__(self, start: int, length: int) -> None:
        self.numbers = range(start, start + length)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)
