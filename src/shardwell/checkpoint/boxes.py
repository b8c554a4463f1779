"""Boxes of tensors, and what a part of one sharding has in common with a part of another.

A tensor-parallel rank holds a box of a tensor, and ZeRO cuts the flat elements of that box into ranges. So the part of
a tensor that one piece holds is a `Region`: a box, and a range of its elements.

    tensor 4 x 6        box at (0, 3), 4 x 3        region: elements 2 to 7 of the box
    . . . . . .         . . . a b c                 . . . . . 2
    . . . . . .         . . . d e f                 . . . 3 4 5
    . . . . . .         . . . g h i                 . . . 6 . .
    . . . . . .         . . . j k l                 . . . . . .

This module has pure values and functions. Dimensions are in the order of memory, the slowest first: `order_of` gives
that order for a tensor of any strides, and `reordered` applies it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwell.sharding.layout import contiguous_stride, product


@dataclass(frozen=True)
class Box:
    """A part of a tensor that has a range of indices in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        return product(self.sizes)

    def position(self, point: Sequence[int]) -> int:
        """Return the flat position in this box of an element of the tensor."""
        steps = zip(point, self.offsets, contiguous_stride(self.sizes), strict=True)
        return sum((at - first) * step for at, first, step in steps)

    def intersection(self, other: Box) -> Box | None:
        """Return the box that both have in common; None if they have nothing in common."""
        offsets, sizes = [], []
        for one, length, two, width in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low, high = max(one, two), min(one + length, two + width)
            if low >= high:
                return None
            offsets.append(low)
            sizes.append(high - low)
        return Box(tuple(offsets), tuple(sizes))

    def is_range_of(self, shape: Sequence[int]) -> bool:
        """Tell whether the box is one range of the flat elements of a tensor of this shape."""
        outer = 0
        while outer < len(shape) and self.sizes[outer] == 1:
            outer += 1
        return self.sizes[outer + 1 :] == tuple(shape[outer + 1 :])


@dataclass(frozen=True)
class Region:
    """Elements `start` to `stop` of a box, counted from the first element of the box."""

    box: Box
    start: int
    stop: int

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes that make up the region, in order: of a matrix, a partial row, full rows, a partial row."""
        return tuple(
            Box(tuple(a + b for a, b in zip(self.box.offsets, offsets, strict=True)), sizes)
            for offsets, sizes in _boxes_of_range(self.box.sizes, self.start, self.stop)
        )

    def span_in(self, box: Box) -> tuple[int, int] | None:
        """Return the range of a box's flat elements outside of which it has nothing in common with the region."""
        found = [common for mine in self.boxes if (common := mine.intersection(box)) is not None]
        if not found:
            return None
        last = [at + size - 1 for at, size in zip(found[-1].offsets, found[-1].sizes, strict=True)]
        return box.position(found[0].offsets), box.position(last) + 1


@dataclass(frozen=True)
class Overlap:
    """A grid of equally long runs that are contiguous both in a target region and in a source region."""

    sizes: tuple[int, ...]  # of the grid; no dimension is longer than it must be
    in_target: int  # first element, counted from the start of the target region
    target_stride: tuple[int, ...]
    in_source: int  # first element, counted from the start of the source region
    source_stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return product(self.sizes)

    @property
    def is_run(self) -> bool:
        """Whether the overlap is a single contiguous run on both sides."""
        return not self.sizes or (self.target_stride == (1,) and self.source_stride == (1,))

    @property
    def source_end(self) -> int:
        """The position behind the last element in the source region."""
        return self.in_source + _span(self.sizes, self.source_stride)

    def part(self, first: int, count: int) -> Overlap:
        """Return the part with `count` indices from `first` on in the first dimension."""
        keeps = 0 if count > 1 else 1  # a dimension of one index is dropped
        return Overlap(
            (count, *self.sizes[1:])[keeps:],
            self.in_target + first * self.target_stride[0],
            self.target_stride[keeps:],
            self.in_source + first * self.source_stride[0],
            self.source_stride[keeps:],
        )


def full_region(shape: Sequence[int]) -> Region:
    """Return all elements of a tensor as a region."""
    box = Box((0,) * len(shape), tuple(shape))
    return Region(box, 0, box.numel)


def overlaps(target: Region, source: Region) -> list[Overlap]:
    """Return what two regions of one tensor have in common, in the order of its elements.

    The positions of both sides grow from one overlap to the next, because elements have the same order in all boxes.
    """
    found = []
    strides = contiguous_stride(target.box.sizes), contiguous_stride(source.box.sizes)
    for mine in target.boxes:
        for other in source.boxes:
            common = mine.intersection(other)
            if common is not None:
                in_target = target.box.position(common.offsets) - target.start
                in_source = source.box.position(common.offsets) - source.start
                found.append(_joined(common.sizes, in_target, strides[0], in_source, strides[1]))
    return found


def reads(found: Sequence[Overlap], limit: int, gap: int) -> Iterator[list[Overlap]]:
    """Yield overlaps in batches, each to be read at once from the source.

    The runs of a batch are at most `gap` elements apart, and span at most `limit` elements, unless the batch is a
    single run, which can be read in place. Large overlaps are split.
    """
    batch: list[Overlap] = []
    for part in (part for one in found for part in _split(one, limit, gap)):
        if batch and (part.in_source - batch[-1].source_end > gap or part.source_end - batch[0].in_source > limit):
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def find_mistiled(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[tuple[int, ...], int] | None:
    """Return an element of a tensor that is not in exactly one of the boxes, and in how many it is; None: all are.

    The number of boxes at each element follows from signed counts at the corners of the boxes, as a function follows
    from its differences. At the first corner whose count is wrong, the number of boxes is wrong by that count.
    """
    dims = cut_dims(shape, boxes)
    counts: defaultdict[tuple[int, ...], int] = defaultdict(int)
    _count_corners(full_region(shape).box, dims, -1, counts)
    for box in boxes:
        _count_corners(box, dims, 1, counts)
    wrong = min((corner for corner, count in counts.items() if count), default=None)
    if wrong is None:
        return None
    element = [0] * len(shape)
    for dim, at in zip(dims, wrong, strict=True):
        element[dim] = at
    return tuple(element), 1 + counts[wrong]


def cut_dims(shape: Sequence[int], boxes: Sequence[Box]) -> list[int]:
    """Return the dimensions in which some box is shorter than the tensor."""
    return [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in boxes)]


# --- orders of dimensions ---------------------------------------------------------------------------------------


def order_of(stride: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor in the order of its memory, the slowest first."""
    return tuple(sorted(range(len(stride)), key=lambda dim: (-stride[dim], dim)))


def reordered(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return one value for each dimension in another order of the dimensions."""
    return tuple(values[dim] for dim in order)


def stride_in_order(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions have this order in memory."""
    strides = [0] * len(order)
    for dim, step in zip(order, contiguous_stride(reordered(shape, order)), strict=True):
        strides[dim] = step
    return tuple(strides)


# --- parts of the above -----------------------------------------------------------------------------------------


def _boxes_of_range(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of the boxes that make up elements `start` to `stop` of a box, in order."""
    if start >= stop:
        return
    if not sizes:
        yield (), ()
        return
    rest = sizes[1:]
    row = product(rest)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _boxes_of_row(rest, first, head, tail)
        return
    if head:
        yield from _boxes_of_row(rest, first, head, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    yield from _boxes_of_row(rest, last, 0, tail)


def _boxes_of_row(
    rest: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in _boxes_of_range(rest, start, stop):
        yield (index, *offsets), (1, *sizes)


def _joined(
    sizes: Sequence[int], in_target: int, target_stride: Sequence[int], in_source: int, source_stride: Sequence[int]
) -> Overlap:
    """Return an overlap in which dimensions are joined where both sides are contiguous."""
    grid: list[tuple[int, int, int]] = []  # size, stride in the target, stride in the source; the fastest first
    for size, mine, other in reversed(list(zip(sizes, target_stride, source_stride, strict=True))):
        if size == 1:
            continue
        if grid and mine == grid[-1][0] * grid[-1][1] and other == grid[-1][0] * grid[-1][2]:
            grid[-1] = (grid[-1][0] * size, *grid[-1][1:])
        else:
            grid.append((size, mine, other))
    grid.reverse()
    return Overlap(
        tuple(size for size, _, _ in grid),
        in_target,
        tuple(mine for _, mine, _ in grid),
        in_source,
        tuple(other for _, _, other in grid),
    )


def _split(one: Overlap, limit: int, gap: int) -> Iterator[Overlap]:
    """Yield parts of an overlap, in order, that are each worth a read of their own; see `reads`."""
    is_dense = _widest_gap(one) <= gap
    if one.is_run or (is_dense and one.source_end - one.in_source <= limit):
        yield one
        return
    step = max(limit // one.source_stride[0], 1) if is_dense else 1
    for first in range(0, one.sizes[0], step):
        yield from _split(one.part(first, min(step, one.sizes[0] - first)), limit, gap)


def _widest_gap(one: Overlap) -> int:
    """Return the most elements between two runs of an overlap in the source."""
    widest = 0
    for dim, step in enumerate(one.source_stride):
        widest = max(widest, step - _span(one.sizes[dim + 1 :], one.source_stride[dim + 1 :]))
    return widest


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory a strided view extends over."""
    return 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))


def _count_corners(box: Box, dims: Sequence[int], sign: int, counts: defaultdict[tuple[int, ...], int]) -> None:
    """Add to the signed counts at the corners of a box, in the given dimensions."""
    for number in range(2 ** len(dims)):
        far = [number >> index & 1 for index in range(len(dims))]
        corner = tuple(box.offsets[dim] + box.sizes[dim] * end for dim, end in zip(dims, far, strict=True))
        counts[corner] += sign * (-1) ** sum(far)
