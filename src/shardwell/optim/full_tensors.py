"""What optimizers that are not elementwise ask for: sums over a whole parameter, and whole matrices.

Such an optimizer (`Lamb`, `Muon`) has an attribute `whole`. By default it is `Alone`: the tensors it steps are the
parameters. Over shards it is replaced by one that knows which ranks hold the other parts. Both methods are collective
there: a step calls each method that it needs exactly once, also when this rank holds no part of anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell.errors import ShardwellError
from shardwell.optim.param_slices import ParamSlice, ParamSlices
from shardwell.parallel import Collectives
from shardwell.sharding import ShardedGroup
from shardwell.sharding.layout import Slot, SlotPiece


def needs_full_tensors(optimizer: Optimizer) -> bool:
    """Whether it is not elementwise: over shards, ranks meet in its steps."""
    return hasattr(optimizer, "whole")


@dataclass(frozen=True)
class SlicePosition:
    """Which part of which parameter an optimizer's tensor is."""

    index: int  # the parameter's number, the same on every rank
    shape: tuple[int, ...]  # ND, of the whole parameter


class FullTensors(Protocol):
    """Whole parameters, for an optimizer that steps parts of them."""

    def place(self, tensor: Tensor) -> SlicePosition:
        """Where a tensor of the optimizer belongs."""

    def sums(self, parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """For each (tensor of the optimizer, 1D partial sums): the sums over all parts of the same parameter.

        Every entry has the same number of sums.
        """

    def through(self, parts: list[tuple[Tensor, Tensor]], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """For each (tensor of the optimizer, values of the same numel): its part of `function(whole values)`.

        `function` takes a parameter in its true shape in bf16 (values are rounded on the way, as torch rounds), leaves
        it alone and returns another; the work is spread over the ranks, and each parameter is computed once.
        """


class LocalFullTensors:
    """Nothing is sharded: every tensor is a whole parameter."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def place(self, tensor: Tensor) -> SlicePosition:
        return SlicePosition(self._numbers.setdefault(id(tensor), len(self._numbers)), tuple(tensor.shape))

    def sums(self, parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [sums for _, sums in parts]

    def through(self, parts: list[tuple[Tensor, Tensor]], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [function(values.bfloat16()) for _, values in parts]


class ShardedFullTensors:
    """The parameters are split over the ranks; their parts are summed, or sent to one rank each and back."""

    def __init__(self, shards: ParamSlices, inner: Optimizer, comm: Collectives) -> None:
        self._shards, self._inner, self._comm = shards, inner, comm
        self._groups: list[ShardedGroup] = []
        self._unseen: set[str] = set()

    def begin(self, groups: list[ShardedGroup], unseen: set[str]) -> None:
        """The next step is over these groups, except for these parameters; the same on every rank."""
        self._groups, self._unseen = groups, unseen
        self._by_tensor = {id(shard.tensor): shard for shard in self._shards}

    def _shard(self, tensor: Tensor) -> ParamSlice:
        return self._by_tensor[id(tensor)]

    def place(self, tensor: Tensor) -> SlicePosition:
        slot = self._shard(tensor).pieces[0].slot
        return SlicePosition(self._shards.numbers[slot.name], slot.shape)

    def sums(self, parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        if not any(group.row.optimizer.axis for group in self._groups):
            return [sums for _, sums in parts]
        width = _NUM_SUMS
        total = torch.zeros(len(self._shards.numbers), width, dtype=torch.float64, device=self._where)
        numbers = [self.place(tensor).index for tensor, _ in parts]
        for number, (_, sums) in zip(numbers, parts, strict=True):
            total[number, : len(sums)] += sums
        self._comm.all_reduce_sum(total, "SUMS")
        return [total[number, : len(sums)].to(sums) for number, (_, sums) in zip(numbers, parts, strict=True)]

    @property
    def _where(self) -> torch.device:
        return self._groups[0].context.device.torch_device

    def through(self, parts: list[tuple[Tensor, Tensor]], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        mine = {self._name(tensor): values.reshape(-1) for tensor, values in parts}
        matrices = list(self._matrices())
        split = [matrix for matrix in matrices if matrix.is_split]
        swap = _Swap(self._comm, split, balance([_cost(matrix.slot) for matrix in split], self._comm.mesh.size))
        wholes = swap.collect(mine, self._where)
        for matrix in matrices:
            if not matrix.is_split:  # every rank has it, and computes it for itself
                wholes[matrix.slot.name] = mine[matrix.slot.name].bfloat16()
            if matrix.slot.name in wholes:
                view = wholes[matrix.slot.name].as_strided(matrix.slot.shape, matrix.slot.stride)
                view.copy_(function(view.contiguous()))
        answers = wholes | swap.give_back(wholes, self._where)
        return [answers[self._name(tensor)] for tensor, _ in parts]

    def _name(self, tensor: Tensor) -> str:
        return self._shard(tensor).pieces[0].slot.name

    def _matrices(self) -> Iterator[_Matrix]:
        """The parameters of this step that are wanted whole, and who holds which part of them."""
        wants_whole: Callable[[dict[str, object]], bool] = self._inner.wants_whole  # type: ignore[attr-defined]
        for group in self._groups:
            is_split = group.row.optimizer.axis is not None
            places = [self._comm.shard_index_of(rank) for rank in range(self._comm.mesh.size)]
            held = [list(group.layout.pieces(place)) for place in places] if is_split else []
            for slot in group.layout.slots:
                label = self._shards.labels[slot.name]
                if label >= 0 and slot.name not in self._unseen and wants_whole(self._inner.param_groups[label]):
                    _check_matrix(slot)
                    parts = [[piece for piece in pieces if piece.slot is slot] for pieces in held]
                    yield _Matrix(slot, is_split, [found[0] if found else None for found in parts])


_NUM_SUMS = 4  # the most sums that an optimizer asks for at once


@dataclass(frozen=True)
class _Matrix:
    slot: Slot
    is_split: bool
    held: list[SlotPiece | None]  # by rank


@dataclass(frozen=True)
class _Swap:
    """Parts of matrices to their owners, and back."""

    comm: Collectives
    matrices: list[_Matrix]
    owners: list[int]

    def _crossing(self, holder: int, owner: int) -> list[tuple[_Matrix, SlotPiece]]:
        """What `holder` has of the matrices of `owner`, in order."""
        return [
            (matrix, piece)
            for matrix, its_owner in zip(self.matrices, self.owners, strict=True)
            if its_owner == owner and (piece := matrix.held[holder]) is not None
        ]

    def collect(self, mine: dict[str, Tensor], where: torch.device) -> dict[str, Tensor]:
        """Send this rank's parts away; returns the matrices that this rank owns, flat."""
        rank, ranks = self.comm.mesh.rank, range(self.comm.mesh.size)
        outgoing = [
            _joined([mine[matrix.slot.name] for matrix, _ in self._crossing(rank, owner)], where) for owner in ranks
        ]
        incoming = [_room(self._crossing(holder, rank), where) for holder in ranks]
        self.comm.all_to_all(outgoing, incoming, "MATRICES")
        wholes = {
            matrix.slot.name: torch.empty(matrix.slot.numel, dtype=torch.bfloat16, device=where)
            for matrix, owner in zip(self.matrices, self.owners, strict=True)
            if owner == rank
        }
        for holder in ranks:
            crossing = self._crossing(holder, rank)
            for (matrix, piece), part in zip(crossing, _cut(incoming[holder], crossing), strict=True):
                wholes[matrix.slot.name][piece.in_parameter : piece.in_parameter + piece.numel] = part
        return wholes

    def give_back(self, wholes: dict[str, Tensor], where: torch.device) -> dict[str, Tensor]:
        """Send each holder its part of what was computed; returns this rank's parts."""
        rank, ranks = self.comm.mesh.rank, range(self.comm.mesh.size)
        outgoing = [
            _joined(
                [
                    wholes[matrix.slot.name][piece.in_parameter : piece.in_parameter + piece.numel]
                    for matrix, piece in self._crossing(holder, rank)
                ],
                where,
            )
            for holder in ranks
        ]
        incoming = [_room(self._crossing(rank, owner), where) for owner in ranks]
        self.comm.all_to_all(outgoing, incoming, "MATRICES BACK")
        answers = {}
        for owner in ranks:
            crossing = self._crossing(rank, owner)
            for (matrix, _), part in zip(crossing, _cut(incoming[owner], crossing), strict=True):
                answers[matrix.slot.name] = part
        return answers


def balance(costs: list[float], num_ranks: int) -> list[int]:
    """Which rank does which piece of work: the most expensive first, always to whoever has least."""
    load = [0.0] * num_ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = load.index(min(load))
        load[owners[index]] += costs[index]
    return owners


def _check_matrix(slot: Slot) -> None:
    if len(slot.shape) < 2:
        raise ShardwellError(f"'{slot.name}' has shape {list(slot.shape)} and is wanted whole as a matrix")


def _cost(slot: Slot) -> float:
    """Of orthogonalising, up to a factor."""
    return float(slot.numel * min(slot.shape[-2:]))


def _joined(parts: list[Tensor], where: torch.device) -> Tensor:
    if not parts:
        return torch.empty(0, dtype=torch.bfloat16, device=where)
    return torch.cat([part.bfloat16() for part in parts])


def _room(crossing: list[tuple[_Matrix, SlotPiece]], where: torch.device) -> Tensor:
    return torch.empty(sum(piece.numel for _, piece in crossing), dtype=torch.bfloat16, device=where)


def _cut(joined: Tensor, crossing: list[tuple[_Matrix, SlotPiece]]) -> list[Tensor]:
    return list(joined.split([piece.numel for _, piece in crossing])) if crossing else []
