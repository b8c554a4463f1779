"""The axes along which ranks are laid out: pipeline, data (replicate x shard x expert x sequence) and tensor.

    axis       ranks along it
    pipe       run other modules (pipeline stages)
    replicate  hold the same shards, and train on other rows (HSDP)
    shard      hold other shards of the same parameters, and train on other rows
    expert     hold other experts, and other shards of all other parameters, and train on other rows
    sequence   hold other shards of the same parameters, and train on other parts of the same sequences
    tensor     hold other parts of the same tensors, and train on the same rows

ZeRO splits states over shard x expert x sequence, those of experts over shard x sequence. The tensor axis is the
innermost one, so that its ranks are in one node. This module has only pure values and functions: it knows no process
groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product as combinations
from math import prod

from shardwell.errors import ConfigError

AXES = ("pipe", "replicate", "shard", "expert", "sequence", "tensor")  # from the outermost to the innermost


@dataclass(frozen=True)
class Grid:
    """The number of ranks along each axis, and which rank is where."""

    pipe: int = 1
    replicate: int = 1
    shard: int = 1
    expert: int = 1
    sequence: int = 1
    tensor: int = 1
    ranks: tuple[int, ...] = ()  # in the order of the axes; empty: 0 to size - 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of ranks along each of `AXES`."""
        return self.pipe, self.replicate, self.shard, self.expert, self.sequence, self.tensor

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return prod(self.shape)

    @property
    def num_batches(self) -> int:
        """Return the number of ranks that train on rows of their own: what a batch size is multiplied by."""
        return self.replicate * self.shard * self.expert

    @property
    def num_parts(self) -> int:
        """Return the number of ranks that hold different parts of the same tensor: of the tensor or expert axis."""
        return self.expert * self.tensor

    @cached_property
    def has_model_axes(self) -> bool:
        """Whether there is another axis than those that shard and replicate."""
        return self.pipe * self.expert * self.sequence * self.tensor > 1

    @property
    def is_reordered(self) -> bool:
        """Whether ranks are in another order than that of the axes."""
        return bool(self.ranks) and list(self.ranks) != list(range(self.size))

    @property
    def model_axes(self) -> dict[str, int]:
        """Return the number of ranks along the axes on which ranks train on the same rows."""
        return {"pipe": self.pipe, "sequence": self.sequence, "tensor": self.tensor}

    def position(self, rank: int) -> dict[str, int]:
        """Return the index of a rank along each axis."""
        rest = self.ranks.index(rank) if self.ranks else rank
        found: dict[str, int] = {}
        for axis, size in zip(reversed(AXES), reversed(self.shape), strict=True):
            rest, found[axis] = divmod(rest, size)
        return {axis: found[axis] for axis in AXES}

    def rank_at(self, position: Mapping[str, int]) -> int:
        """Return the rank with this index along each axis."""
        place = self.rank_index(position)
        return self.ranks[place] if self.ranks else place

    def rank_index(self, position: Mapping[str, int]) -> int:
        """Return the place among all ranks of the one with this index along each axis."""
        place = 0
        for axis, size in zip(AXES, self.shape, strict=True):
            place = place * size + position[axis]
        return place

    def lines(self, *along: str) -> list[list[int]]:
        """Return the groups of ranks that differ only in their index along these axes; every rank is in one."""
        sizes = dict(zip(AXES, self.shape, strict=True))
        fixed = [axis for axis in AXES if axis not in along]
        moving = [axis for axis in AXES if axis in along]

        def places(axes: list[str]) -> list[dict[str, int]]:
            return [dict(zip(axes, at, strict=True)) for at in combinations(*(range(sizes[axis]) for axis in axes))]

        return [[self.rank_at({**outer, **inner}) for inner in places(moving)] for outer in places(fixed)]

    def line(self, rank: int, *along: str) -> list[int]:
        """Return the group of a rank among `lines`, without making the others."""
        here, step = self.position(rank), 1
        first = self.rank_index({**here, **dict.fromkeys(along, 0)})
        found: Sequence[int] = range(first, first + 1)
        for axis, size in zip(reversed(AXES), reversed(self.shape), strict=True):
            if axis in along and size > 1:
                found = _repeated(found, step, size)
            step *= size
        return [self.ranks[place] for place in found] if self.ranks else list(found)

    def batch_rank(self, rank: int) -> int:
        """Return which share of the rows a rank trains on, from 0 to `num_batches` - 1."""
        at = self.position(rank)
        return (at["replicate"] * self.shard + at["shard"]) * self.expert + at["expert"]

    def __str__(self) -> str:
        return " x ".join(f"{size} ({axis})" for axis, size in zip(AXES, self.shape, strict=True) if size > 1) or "1"


def _repeated(places: Sequence[int], step: int, size: int) -> Sequence[int]:
    """Return places, then each of them a step further, and so on; evenly spaced ones without visiting each."""
    if isinstance(places, range):
        if len(places) == 1:
            return range(places.start, places.start + step * size, step)
        if step == places.step * len(places):
            return range(places.start, places.start + step * size, places.step)
    return [place + step * index for index in range(size) for place in places]


def grid_of_sizes(num_ranks: int, *, pipe: int = 1, expert: int = 1, sequence: int = 1, tensor: int = 1) -> Grid:
    """Return the grid in which the ranks that are left after the other axes shard; raise if the sizes do not fit."""
    model = pipe * expert * sequence * tensor
    if num_ranks % model:
        raise ConfigError(
            f"{num_ranks} rank(s) cannot be laid out as {pipe} (pipeline.stages) x {expert} "
            f"(shardwell.expert_parallel_size) x {sequence} (sequence_parallel_size) x {tensor} "
            f"(tensor_parallel.autotp_size) = {model} times a number of data-parallel ranks: start a multiple of that "
            "number, or make the axes smaller"
        )
    return Grid(pipe=pipe, shard=num_ranks // model, expert=expert, sequence=sequence, tensor=tensor)
