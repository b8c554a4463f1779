"""`RepeatingLoader`: a data loader that begins again when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shardwell.errors import ShardwellError


class RepeatingLoader:
    """An iterator over a loader without end; each pass makes a new iterator of the loader."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        """Return the batches of one pass."""
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
        try:
            return next(self.data_iter)
        except StopIteration:
            raise ShardwellError("RepeatingLoader: the loader is empty, so it can never give a batch") from None
