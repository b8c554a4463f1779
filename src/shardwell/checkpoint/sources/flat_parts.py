"""The positions of elements in DeepSpeed's flat tensors, which are sharded over the ranks.

A rank's shard of a group of parameters is one flat tensor of masters, and one for each state of the optimizer. At
stages 1 and 2 the concatenated parameters are sharded; at stage 3 each parameter is sharded by itself.

    stages 1, 2   rank 0 | a   | b..|   rank 1 |..b | c |pad|
    stage 3       rank 0 | a. | b. | c. |   rank 1 | .a | .b | .c+pad |
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwell.checkpoint.parsing import show
from shardwell.checkpoint.sources.base import MODEL, SCALAR, STATE, StoredTensor
from shardwell.checkpoint.sources.mapped import copy_mapped
from shardwell.checkpoint.sources.torch_files import number
from shardwell.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]

ALIGNMENT = 2  # elements; stages 1 and 2 pad each rank's part to a multiple


class FlatSpan(NamedTuple):
    """Elements `start` to `stop` of a tensor: those of a rank's flat tensor from `first` on."""

    rank: int
    first: int
    start: int
    stop: int


class FlatPart(NamedTuple):
    """The shard of one group of parameters on one rank."""

    file: Path
    masters: Any
    state: Mapping[str, Any]


def cut_together(
    numels: Mapping[str, int], paddings: list[int], ranks: int
) -> tuple[dict[str, list[FlatSpan]], list[set[int]]]:
    """Return the spans of stages 1 and 2: concatenated parameters, each with its padding, in equal shards.

    The other result is the number of elements that each rank may have: with the padding at the end, or without.
    """
    total = sum(numels.values()) + sum(paddings)
    size = ALIGNMENT * -(-total // (ALIGNMENT * ranks))
    spans: dict[str, list[FlatSpan]] = {}
    begin = 0
    for (name, numel), padding in zip(numels.items(), paddings, strict=True):
        end, spans[name] = begin + numel, []
        for rank in range(begin // size, -(-end // size)) if numel else ():
            first, last = max(begin, rank * size), min(end, (rank + 1) * size)
            spans[name].append(FlatSpan(rank, first - rank * size, first - begin, last - begin))
        begin = end + padding
    return spans, [{size, min(max(total - rank * size, 0), size)} for rank in range(ranks)]


def cut_each(numels: Mapping[str, int], ranks: int) -> tuple[dict[str, list[FlatSpan]], list[set[int]]]:
    """Return the spans of stage 3: each parameter in equal shards, the last one padded; see `cut_together`."""
    spans: dict[str, list[FlatSpan]] = {}
    first = 0
    for name, numel in numels.items():
        part = -(-numel // ranks)
        ends = [(rank, min(rank * part, numel), min((rank + 1) * part, numel)) for rank in range(ranks)]
        spans[name] = [FlatSpan(rank, first, start, stop) for rank, start, stop in ends if start < stop]
        first += part
    return spans, [{first}] * ranks


class FlatParts:
    """Tensors that are assembled from shards, and the scalars of the optimizer's state."""

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.values: dict[str, Any] = {}
        self._places: dict[str, tuple[list[FlatSpan], list[Tensor]]] = {}

    def add(self, name: str, shape: tuple[int, ...], spans: list[FlatSpan], flats: list[Tensor], file: Path) -> None:
        """Add a tensor, and the flat tensors of the ranks that hold its spans."""
        if name in self.tensors:
            raise CheckpointError(f"{file}: tensor {show(name)}: there twice")
        if any(flat.dtype != flats[0].dtype for flat in flats):
            raise CheckpointError(f"{file}: tensor {show(name)}: ranks have it in different dtypes")
        self.tensors[name] = StoredTensor(flats[0].dtype, shape)
        self._places[name] = spans, flats

    def add_full(self, name: str, tensor: Tensor, file: Path) -> None:
        """Add a full tensor that one file holds."""
        if tensor.numel() * tensor.dtype.itemsize > file.stat().st_size:
            raise CheckpointError(f"{file}: tensor {show(name)}: has more bytes than the file")
        self.add(name, tuple(tensor.shape), [FlatSpan(0, 0, 0, tensor.numel())], [tensor.detach().reshape(-1)], file)

    def add_state(self, name: str, key: str, value: Any, file: Path) -> None:
        """Add an entry of a parameter's optimizer state that one file holds."""
        if _is_split(value):
            self.add_full(f"{STATE}{name}/{key}", value, file)
        elif number(value) is not None:
            self.values[f"{SCALAR}{name}/{key}"] = number(value)

    def add_group(
        self, shapes: Shapes, spans: Mapping[str, list[FlatSpan]], parts: list[FlatPart], sizes: list[set[int]]
    ) -> None:
        """Add the masters and the state of a group of parameters; `sizes` are those that each rank's shard may have."""
        file, state = parts[0].file, parts[0].state
        for part, allowed in zip(parts, sizes, strict=True):
            _check(part, allowed, next(iter(shapes), "(none)"))
            _check_same(state, part, next(iter(shapes), "(none)"))
        masters = [part.masters.detach() for part in parts]
        split = {key: [part.state[key].detach() for part in parts] for key in state if _is_split(state[key])}
        for name, shape in shapes.items():
            self.add(f"{MODEL}{name}", shape, spans[name], masters, file)
            for key, value in state.items():
                if key in split:
                    self.add(f"{STATE}{name}/{key}", shape, spans[name], split[key], file)
                else:
                    self.add_state(name, key, value, file)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return a copy of elements; they must exist."""
        spans, flats = self._places[name]
        parts: list[Tensor] = []
        for span in spans[max(bisect_right(spans, start, key=lambda span: span.start) - 1, 0) :]:
            if span.start >= stop:
                break
            first, last = max(start, span.start), min(stop, span.stop)
            shift = span.first - span.start
            parts.append(flats[span.rank][first + shift : last + shift])
        found = torch.empty(sum(map(torch.numel, parts)), dtype=self.tensors[name].dtype, device="cpu")
        end = 0
        for part in parts:
            begin, end = end, end + part.numel()
            copy_mapped(part.contiguous(), found[begin:end])
        return found


def _is_split(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _check(part: FlatPart, sizes: set[int], name: str) -> None:
    """Raise unless the masters and each state are flat tensors of one of these sizes; `name` is for the message."""
    flats = {f"{MODEL}{name}": part.masters}
    flats |= {f"{STATE}{name}/{key}": value for key, value in part.state.items() if _is_split(value)}
    for key, flat in flats.items():
        if not _is_split(flat) or flat.dim() != 1 or not flat.is_contiguous() or flat.numel() not in sizes:
            found = show(tuple(flat.shape)) if isinstance(flat, Tensor) else show(flat)
            raise CheckpointError(
                f"{part.file}: {key} and the rest of its group: expected {max(sizes)} elements, found {found}; "
                "the file is of another checkpoint, or the tensor was offloaded to a disk"
            )


def _check_same(state: Mapping[str, Any], part: FlatPart, name: str) -> None:
    """Raise unless an entry of the state is sharded on all ranks, or the same number on all."""
    for key in sorted(state.keys() | part.state.keys()):
        one, other = state.get(key), part.state.get(key)
        if _is_split(one) != _is_split(other) or (not _is_split(one) and number(one) != number(other)):
            raise CheckpointError(
                f"{part.file}: {STATE}{name}/{key}: ranks disagree; the files are of different checkpoints"
            )
