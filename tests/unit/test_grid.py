"""The axes along which ranks are laid out, and the parts of tensors that ranks hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwell.config import load
from shardwell.errors import ConfigError
from shardwell.parallel.grid import AXES, Grid, grid_of_sizes
from shardwell.sharding.tensor_part import TensorPart

SIZES = st.integers(1, 3)


@settings(deadline=None)
@given(st.tuples(SIZES, SIZES, SIZES, SIZES, SIZES), st.sets(st.sampled_from(AXES)), st.randoms())
def test_every_rank_is_in_one_line_of_each_axis(shape: tuple[int, ...], along: set[str], random: object) -> None:
    ranks = list(range(Grid(*shape).size))
    random.shuffle(ranks)  # type: ignore[attr-defined]
    for grid in (Grid(*shape), Grid(*shape, ranks=tuple(ranks))):
        lines = grid.lines(*along)
        assert sorted(rank for line in lines for rank in line) == list(range(grid.size))
        for line in lines:
            places = [grid.position(rank) for rank in line]
            assert all(place[axis] == places[0][axis] for place in places for axis in AXES if axis not in along)
            assert [grid.rank_at(place) for place in places] == line


def test_tensor_ranks_are_neighbours_and_share_rows() -> None:
    grid = grid_of_sizes(8, tensor=2)
    assert grid.lines("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [grid.batch_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert str(grid) == "4 (shard) x 2 (tensor)"


def test_sizes_that_do_not_fit_are_one_error_with_the_numbers() -> None:
    config = {"tensor_parallel": {"autotp_size": 3}, "pipeline": {"stages": 2}}
    with pytest.raises(ConfigError, match=r"8 rank\(s\) cannot be divided by 2 .* x 3 \(.*autotp_size\) = 6"):
        load(config, world_size=8)
    with pytest.raises(ConfigError, match="3 contradicts the mesh, which has 2"):
        load({"tensor_parallel": {"autotp_size": 3}}, world_size=8, axes={"pipe": 1, "sequence": 1, "tensor": 2})


def test_batch_sizes_count_ranks_with_rows_of_their_own() -> None:
    found = load({"tensor_parallel": {"autotp_size": 4}, "train_micro_batch_size_per_gpu": 3}, world_size=8)
    assert found.train_batch_size == 6
    mesh = load({"train_batch_size": 8}, world_size=8, axes={"pipe": 1, "sequence": 1, "tensor": 2})
    assert mesh.train_micro_batch_size_per_gpu == 2


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_parts_tile_the_tensor(num_parts: int, dim: int, blocks: list[int]) -> None:
    shape = [2, 3, 4]
    shape.insert(dim, sum(blocks))
    whole = torch.arange(torch.tensor(shape).prod()).view(shape)
    parts = [TensorPart(tuple(shape), dim, num_parts, index, tuple(blocks)) for index in range(num_parts)]
    cut = [part.cut(whole) for part in parts]
    assert [tuple(one.shape) for one in cut] == [parts[0].shape_of(index) for index in range(num_parts)]
    assert parts[0].join(cut).equal(whole)
