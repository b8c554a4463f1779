"""Reads tensors from a source: in place, in parts, in order, in full, or regions of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor

from shardwell.checkpoint.boxes import Region, full_region, order_of, overlaps, reads, reordered
from shardwell.checkpoint.checksums import BLOCK
from shardwell.checkpoint.reader import allocate_flat
from shardwell.checkpoint.sources.base import MODEL, Source, StoredTensor
from shardwell.errors import CheckpointError
from shardwell.sharding.layout import contiguous_stride

PART = 2**22  # elements of one read
STAGE = 2**24  # bytes of one read whose elements do not lie together in the destination
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


@runtime_checkable
class RegionRead(Protocol):
    """A source that knows how to read a region of a tensor."""

    def read_region(self, name: str, target: Region, flat: Tensor) -> None: ...


def region_into(source: Source, name: str, target: Region, flat: Tensor) -> None:
    """Fill a 1D tensor on the CPU with a region of a tensor, whose dimensions are in the stored order."""
    stored = source.tensors[name]
    if flat.dtype != stored.dtype:
        same = allocate_flat(flat.numel(), stored.dtype, f"{source.where}: tensor {name!r}")
        region_into(source, name, target, same)
        flat.copy_(same)
    elif isinstance(source, RegionRead):
        source.read_region(name, target, flat)
    else:
        everything = full_region(reordered(stored.shape, order_of(stored.order)))
        gather(target, everything, flat, lambda first, out: into(source, name, first, out))


def gather(target: Region, piece: Region, flat: Tensor, read: Callable[[int, Tensor], object]) -> int:
    """Fill the elements of a target region that a piece has; return how many these are.

    `flat` holds the elements of the target, and `read(first, out)` fills a tensor with elements of the piece. Elements
    that are close together in the piece are read at once: they share the blocks that are read for their checksums.
    """
    found = overlaps(target, piece)
    for batch in reads(found, STAGE // flat.itemsize, BLOCK // flat.itemsize):
        first, last = batch[0].in_source, batch[-1].source_end
        if len(batch) == 1 and batch[0].is_run:
            read(first, flat[batch[0].in_target :][: last - first])
            continue
        staged = allocate_flat(last - first, flat.dtype, "a region of a tensor")
        read(first, staged)
        for one in batch:
            place = flat.as_strided(one.sizes, one.target_stride, flat.storage_offset() + one.in_target)
            place.copy_(staged.as_strided(one.sizes, one.source_stride, one.in_source - first))
    return sum(one.numel for one in found)


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
