"""Reads tensors from a source: in place, in parts, in order, or in full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor

from shardwell.checkpoint.sources.base import MODEL, Source, StoredTensor
from shardwell.errors import CheckpointError
from shardwell.sharding.layout import contiguous_stride

PART = 2**22  # elements of one read
Progress = Callable[[int], object]  # called with the bytes read since the last call


def weights(source: Source) -> list[str]:
    """Return the names of the model's tensors."""
    names = [name for name in source.tensors if name.startswith(MODEL)]
    if not names:
        raise CheckpointError(f"{source.where}: holds no tensor of a model")
    return names


@runtime_checkable
class DirectRead(Protocol):
    """A source that can read into a tensor without an intermediate one."""

    def read_into(self, name: str, start: int, flat: Tensor) -> None: ...


def into(source: Source, name: str, start: int, flat: Tensor) -> None:
    """Fill a 1D tensor on the CPU with the elements from `start` on."""
    if isinstance(source, DirectRead) and flat.dtype == source.tensors[name].dtype:
        source.read_into(name, start, flat)
    else:
        flat.copy_(source.read(name, start, start + flat.numel()))


def parts(source: Source, name: str, progress: Progress | None = None, limit: int | None = None) -> Iterator[Tensor]:
    """Yield a tensor's elements in stored order, at most `limit` (by default `PART`) at a time."""
    numel, limit = source.tensors[name].numel, limit or PART
    for start in range(0, numel, limit):
        part = source.read(name, start, min(start + limit, numel))
        yield part
        if progress is not None:
            progress(part.nbytes)


def in_order(source: Source, name: str, progress: Progress | None = None, limit: int | None = None) -> Iterator[Tensor]:
    """Yield a tensor's elements in the order of its dimensions; in one part, if they are stored in another order."""
    if is_contiguous(source.tensors[name]):
        yield from parts(source, name, progress, limit)
    else:
        yield read_full(source, name, progress).view(-1)


def read_full(source: Source, name: str, progress: Progress | None = None) -> Tensor:
    """Return a full tensor in its shape, contiguous."""
    stored = source.tensors[name]
    flat = source.read(name, 0, stored.numel)
    if progress is not None:
        progress(flat.nbytes)
    return flat.as_strided(stored.shape, stored.order).contiguous()


def is_contiguous(stored: StoredTensor) -> bool:
    steps = zip(stored.shape, stored.order, contiguous_stride(stored.shape), strict=True)
    return stored.numel == 0 or all(size == 1 or step == wanted for size, step, wanted in steps)
