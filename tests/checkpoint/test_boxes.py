"""Regions of tensors: what two of them have in common is found exactly, as numpy finds it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardwell.checkpoint.boxes import (
    Box,
    Overlap,
    Region,
    find_mistiled,
    full_region,
    order_of,
    overlaps,
    reads,
    reordered,
    stride_in_order,
)

Numbers = NDArray[np.int64]
shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    ends = [sorted(draw(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)))) for size in shape]
    box = Box(tuple(low for low, _ in ends), tuple(high - low + 1 for low, high in ends))
    start, stop = sorted(draw(st.tuples(st.integers(0, box.numel), st.integers(0, box.numel))))
    return Region(box, start, stop)


def elements(shape: tuple[int, ...], region: Region) -> Numbers:
    """The numbers of a region's elements in the flat tensor."""
    numbers = np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)
    box = region.box
    cut = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
    found: Numbers = numbers[cut].reshape(-1)[region.start : region.stop]
    return found


def positions(first: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    steps = [np.arange(size) * step for size, step in zip(sizes, strides, strict=True)]
    return [first + int(sum(each)) for each in np.stack(np.meshgrid(*steps, indexing="ij"), -1).reshape(-1, len(sizes))]


def pairs(found: list[Overlap]) -> list[tuple[int, int]]:
    """Positions in the target and in the source, element by element."""
    both: list[tuple[int, int]] = []
    for one in found:
        mine = positions(one.in_target, one.sizes, one.target_stride) if one.sizes else [one.in_target]
        other = positions(one.in_source, one.sizes, one.source_stride) if one.sizes else [one.in_source]
        both += zip(mine, other, strict=True)
    return both


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_overlaps_are_the_elements_that_both_regions_have(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    target, source = data.draw(regions(shape)), data.draw(regions(shape))
    mine, other = elements(shape, target), elements(shape, source)
    _, in_target, in_source = np.intersect1d(mine, other, assume_unique=True, return_indices=True)
    assert pairs(overlaps(target, source)) == list(zip(in_target.tolist(), in_source.tolist(), strict=True))


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_read_is_near_together_and_nothing_is_read_twice_or_lost(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    target, source = data.draw(regions(shape)), data.draw(regions(shape))
    limit, gap = data.draw(st.integers(1, 20)), data.draw(st.integers(0, 10))
    found = overlaps(target, source)
    batches = list(reads(found, limit, gap))
    assert pairs([one for batch in batches for one in batch]) == pairs(found)
    for batch in batches:
        used = [at for _, at in pairs(batch)]
        assert (used[0], used[-1] + 1) == (batch[0].in_source, batch[-1].source_end)
        assert (len(batch) == 1 and batch[0].is_run) or used[-1] - used[0] < limit
        assert all(after - before - 1 <= gap for before, after in pairwise(used))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_the_span_in_a_box_holds_what_is_common_and_ends_there(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    target, box = data.draw(regions(shape)), data.draw(regions(shape)).box
    common = [at for _, at in pairs(overlaps(target, Region(box, 0, box.numel)))]
    assert target.span_in(box) == ((common[0], common[-1] + 1) if common else None)


def test_a_column_of_rows_is_one_grid_of_runs() -> None:
    right = Region(Box((0, 3), (4, 3)), 0, 12)
    assert overlaps(full_region((4, 6)), right) == [Overlap((4, 3), 3, (6, 1), 0, (3, 1))]
    assert overlaps(right, right) == [Overlap((12,), 0, (1,), 0, (1,))]
    assert overlaps(Region(right.box, 2, 7), full_region((4, 6))) == [
        Overlap((), 0, (), 5, ()),
        Overlap((3,), 1, (1,), 9, (1,)),
        Overlap((), 4, (), 15, ()),
    ]


def test_rows_far_apart_are_read_one_by_one_and_near_ones_together() -> None:
    half = overlaps(Region(Box((0, 0), (4, 50)), 0, 200), full_region((4, 100)))
    assert [len(batch) for batch in reads(half, 1000, 50)] == [1]
    assert [one.is_run for batch in reads(half, 1000, 49) for one in batch] == [True] * 4
    assert [[one.sizes for one in batch] for batch in reads(half, 210, 50)] == [[(2, 50)], [(2, 50)]]


# --- tiling -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_boxes_that_do_not_tile_are_found_with_an_element(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
    boxes = data.draw(st.lists(regions(shape).map(lambda region: region.box), max_size=4))
    boxes += _halves(Box((0,) * len(shape), shape), data) if data.draw(st.booleans()) else []
    counts = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        counts[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] += 1
    found = find_mistiled(shape, boxes)
    if (counts == 1).all():
        assert found is None
    else:
        assert found is not None
        element, count = found
        assert counts[element] == count != 1


def _halves(box: Box, data: st.DataObject) -> list[Box]:
    """A box cut in two, and the parts again, by chance."""
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if not dims or data.draw(st.booleans()):
        return [box]
    dim = data.draw(st.sampled_from(dims))
    size = data.draw(st.integers(1, box.sizes[dim] - 1))
    first = (*box.sizes[:dim], size, *box.sizes[dim + 1 :])
    second = (*box.sizes[:dim], box.sizes[dim] - size, *box.sizes[dim + 1 :])
    offsets = (*box.offsets[:dim], box.offsets[dim] + size, *box.offsets[dim + 1 :])
    return [*_halves(Box(box.offsets, first), data), *_halves(Box(offsets, second), data)]


@settings(deadline=None)
@given(st.data())
def test_any_cut_into_boxes_is_a_tiling(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    assert find_mistiled(shape, _halves(Box((0,) * len(shape), shape), data)) is None


# --- orders -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_strides_and_orders_of_dimensions_belong_together(order: list[int], shape: list[int]) -> None:
    stride = stride_in_order(shape, order)
    memory = np.arange(np.prod(shape)).reshape(reordered(shape, order))
    view = memory.transpose(np.argsort(order))
    assert view.shape == tuple(shape)
    assert stride_in_order(shape, order_of(stride)) == stride or 1 in shape
    again = memory.reshape(-1)[sum(np.indices(shape)[dim] * step for dim, step in enumerate(stride))]
    assert (again == view).all()


@pytest.mark.parametrize(
    ("shape", "box", "is_range"),
    [
        ((4, 6), Box((1, 0), (2, 6)), True),
        ((4, 6), Box((1, 2), (1, 3)), True),
        ((4, 6), Box((0, 2), (4, 3)), False),
        ((4, 1, 6), Box((1, 0, 0), (2, 1, 6)), True),
        ((2, 4, 6), Box((1, 1, 0), (1, 2, 6)), True),
        ((2, 4, 6), Box((0, 1, 0), (2, 2, 6)), False),
        ((), Box((), ()), True),
    ],
)
def test_rows_are_ranges_of_the_flat_tensor(shape: tuple[int, ...], box: Box, is_range: bool) -> None:
    assert box.is_range_of(shape) == is_range
