"""Compares two checkpoints of any kind, which are read in parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwell.checkpoint.sources.base import MODEL, Source
from shardwell.checkpoint.sources.reading import PART, Progress, in_order, is_contiguous

_MISSING = object()


@dataclass(frozen=True)
class Difference:
    """The difference of a tensor that both checkpoints have."""

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[torch.dtype, torch.dtype]
    num_differ: int  # elements that differ by more than the tolerance
    absolute: float  # the largest difference
    relative: float  # the largest, each as a share of the larger of the two magnitudes


@dataclass
class Comparison:
    """The differences of two checkpoints."""

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    tensors: list[Difference] = field(default_factory=list)  # those that differ in any way
    values: list[str] = field(default_factory=list)  # the names of values that differ, or that only one has
    num_same: int = 0

    @property
    def same(self) -> bool:
        """Return whether the checkpoints differ in nothing."""
        return not (self.only_first or self.only_second or self.tensors or self.values)


def compare(
    first: Source,
    second: Source,
    tolerance: float = 0.0,
    only_weights: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two checkpoints. Numbers are equal if they differ by at most `tolerance`, absolute or relative.

    A relative difference is a share of the larger magnitude. NaN equals NaN. Dtypes may differ only if there is a
    tolerance. `progress` is called with the bytes read of the first checkpoint.
    """
    found = Comparison()
    names = dict.fromkeys([*first.tensors, *second.tensors])
    for name in [name for name in names if name.startswith(MODEL) or not only_weights]:
        if name not in second.tensors:
            found.only_first.append(name)
        elif name not in first.tensors:
            found.only_second.append(name)
        else:
            difference = _compare(name, first, second, tolerance, progress)
            if difference is None:
                found.num_same += 1
            else:
                found.tensors.append(difference)
    if not only_weights:
        keys = dict.fromkeys([*first.values, *second.values])
        found.values = [key for key in keys if first.values.get(key, _MISSING) != second.values.get(key, _MISSING)]
    return found


def _compare(
    name: str, first: Source, second: Source, tolerance: float, progress: Progress | None
) -> Difference | None:
    one, two = first.tensors[name], second.tensors[name]
    num_differ, absolute, relative = 0, 0.0, 0.0
    if one.shape == two.shape:
        for a, b in _pairs(name, first, second, progress):
            count, largest, share = _distance(a, b, tolerance)
            num_differ, absolute, relative = num_differ + count, max(absolute, largest), max(relative, share)
    if one.shape == two.shape and not num_differ and (one.dtype == two.dtype or tolerance):
        return None
    return Difference(name, (one.shape, two.shape), (one.dtype, two.dtype), num_differ, absolute, relative)


def _pairs(name: str, first: Source, second: Source, progress: Progress | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same slices of both tensors."""
    stored = first.tensors[name]
    limit = PART if is_contiguous(stored) and is_contiguous(second.tensors[name]) else max(stored.numel, 1)
    yield from zip(in_order(first, name, progress, limit), in_order(second, name, None, limit), strict=True)


def _distance(a: Tensor, b: Tensor, tolerance: float) -> tuple[int, float, float]:
    """Return the number of elements that differ by more than the tolerance, and the largest differences."""
    if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return 0, 0.0, 0.0
    same = (a == b) | (a.isnan() & b.isnan())  # before they are made real: large integers would be rounded
    a, b = a.double(), b.double()
    gap = (a - b).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    size = torch.maximum(a.abs(), b.abs())
    share = (gap / size).masked_fill(same, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    far = (gap > tolerance) & (share > tolerance) if tolerance else ~same
    return int(far.sum()), float(gap.max()), float(share.max())
