"""The arithmetic of flat buffers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwell.sharding.layout import ALIGNMENT, Layout, TensorSpec, contiguous_stride, dense_stride, make_layout

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=12)
LAYOUTS = st.builds(
    lambda shapes, labels, shards: make_layout(
        [TensorSpec(f"p{i}", shape, label=labels[i % len(labels)]) for i, shape in enumerate(shapes)], shards
    ),
    SHAPES,
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.integers(1, 9),
)


@given(LAYOUTS)
def test_every_element_has_one_place_and_no_padding_stands_between(layout: Layout) -> None:
    offset = 0
    for slot in layout.slots:
        assert slot.offset == offset
        offset = slot.end
    assert offset == layout.numel <= layout.padded


@given(LAYOUTS)
def test_shards_are_equal_aligned_and_cover_the_buffer(layout: Layout) -> None:
    assert layout.shard_numel * layout.num_shards == layout.padded
    assert layout.shard_numel % ALIGNMENT == 0
    assert layout.padded - layout.numel < ALIGNMENT * layout.num_shards + layout.num_shards


@given(LAYOUTS)
def test_pieces_of_all_shards_are_the_parameters(layout: Layout) -> None:
    seen = {slot.name: [False] * slot.numel for slot in layout.slots}
    for index in range(layout.num_shards):
        start, _ = layout.shard_range(index)
        for piece in layout.pieces(index):
            assert start + piece.in_shard == piece.slot.offset + piece.in_parameter
            for element in range(piece.in_parameter, piece.in_parameter + piece.numel):
                assert not seen[piece.slot.name][element]
                seen[piece.slot.name][element] = True
    assert all(all(marks) for marks in seen.values())


@given(LAYOUTS)
def test_runs_hold_one_label_each_and_all_pieces(layout: Layout) -> None:
    for index in range(layout.num_shards):
        runs = layout.runs(index)
        assert [piece for run in runs for piece in run.pieces] == list(layout.pieces(index))
        for run in runs:
            assert {piece.slot.label for piece in run.pieces} == {run.label}
            assert sum(piece.numel for piece in run.pieces) == run.numel
        for before, after in pairwise(runs):
            assert before.label != after.label
            assert before.start + before.numel == after.start


@given(LAYOUTS)
def test_a_shard_has_at_most_two_runs_per_label(layout: Layout) -> None:
    for index in range(layout.num_shards):
        labels = [run.label for run in layout.runs(index)]
        assert all(labels.count(label) <= 2 for label in labels)


def test_even_sizes_come_first_so_that_they_stay_aligned() -> None:
    layout = make_layout([TensorSpec("odd", (3,)), TensorSpec("even", (4, 8)), TensorSpec("bias", (16,))], 2)
    assert [slot.name for slot in layout.slots] == ["even", "bias", "odd"]
    assert all(slot.offset % ALIGNMENT == 0 for slot in layout.slots if slot.name != "odd")


@given(st.permutations([0, 1, 2]), st.tuples(*[st.integers(1, 4)] * 3))
def test_dense_strides_are_kept(order: list[int], shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape).permute(order)
    kept = dense_stride(tuple(tensor.shape), tensor.stride())
    places = torch.arange(tensor.numel()).as_strided(tensor.shape, kept)
    assert sorted(places.flatten().tolist()) == list(range(tensor.numel()))


def test_strides_with_gaps_or_overlap_become_contiguous() -> None:
    for tensor in (torch.empty(4, 6)[:, ::2], torch.empty(1, 5).expand(3, 5)):
        shape = tuple(tensor.shape)
        assert dense_stride(shape, tensor.stride()) == contiguous_stride(shape)


def test_a_parameter_is_all_of_its_tensor_unless_its_box_says_otherwise() -> None:
    part = TensorSpec("part", (4, 3), global_shape=(8, 3), global_offset=(4, 0))
    slots = {slot.name: slot for slot in make_layout([TensorSpec("all", (4, 3)), part], 2).slots}
    assert slots["all"].box == ((4, 3), (0, 0))
    assert slots["part"].box == ((8, 3), (4, 0))
    assert slots["part"].numel == slots["all"].numel == 12  # a buffer holds the part alone


@pytest.mark.parametrize("box", [((8,), (4,)), ((8, 3), (5, 0)), ((8, 2), (0, 0)), ((8, 3), (-1, 0))])
def test_a_box_lies_in_its_tensor(box: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="p: "):
        TensorSpec("p", (4, 3), global_shape=box[0], global_offset=box[1])
