"""DeepSpeed's topologies: names for the axes of ranks. `PipelineModule(topology=...)` reads the number of stages."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from shardwell.errors import ConfigError, ShardwellError


class _NoSuchPointError(ShardwellError, AssertionError, KeyError):
    """A point that a topology does not have, which is an AssertionError in DeepSpeed."""

    __str__ = Exception.__str__


class ProcessTopology:
    """Ranks as the points of a grid, the last axis of which is the innermost."""

    def __init__(self, axes: list[str], dims: list[int], *, ranks: Sequence[int] = ()) -> None:
        """Lay ranks out in their order, or in that of `ranks`."""
        self.axes, self.dims = list(axes), list(dims)
        make_class: Any = namedtuple
        self.ProcessCoord = make_class("ProcessCoord", axes)
        self.mapping: dict[Any, int] = {}
        for number, point in enumerate(product(*(range(dim) for dim in dims))):
            self.mapping[self.ProcessCoord(*point)] = ranks[number] if ranks else number

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a point."""
        if len(coord_kwargs) != len(self.axes):
            raise ValueError(f"get_rank needs all axes: {', '.join(self.axes)}; filter_match takes some of them")
        point = self.ProcessCoord(**coord_kwargs)
        if point not in self.mapping:
            raise _NoSuchPointError(f"{point} is not in a topology of {self._shown()}")
        return self.mapping[point]

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return a rank as a text for names of files: `model_00`, by default without the axes data and pipe."""
        point = self.get_coord(rank)
        named = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(point, axis):02d}" for axis in named)

    def get_axis_names(self) -> list[str]:
        """Return the axes, from the outermost to the innermost."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the ranks along an axis; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the point of a rank."""
        found = next((point for point, number in self.mapping.items() if number == rank), None)
        if found is None:
            raise ValueError(f"rank {rank} is not in a topology of {self._shown()}")
        return found

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks whose index along an axis is `idx`."""
        return sorted(rank for point, rank in self.mapping.items() if getattr(point, axis) == idx)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the lines of ranks along an axis."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        lines: dict[Any, list[int]] = {}
        for point, rank in self.mapping.items():
            lines.setdefault(tuple(getattr(point, name) for name in others), []).append(rank)
        return list(lines.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks whose indices match."""
        wanted = filter_kwargs.items()
        return [rank for point, rank in self.mapping.items() if all(getattr(point, key) == at for key, at in wanted)]

    def world_size(self) -> int:
        return prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)

    def _shown(self) -> str:
        return " x ".join(f"{dim} ({axis})" for axis, dim in zip(self.axes, self.dims, strict=True))


class PipeDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, each of several data-parallel ranks: the layout of shardwell's ranks."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, data-parallel ranks and tensor-parallel ones."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        if num_mp != 1:
            raise ConfigError(
                f"PipeModelDataParallelTopology(num_mp={num_mp}): set tensor_parallel.autotp_size in the "
                "configuration, and leave num_mp at 1"
            )
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
