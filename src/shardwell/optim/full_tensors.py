"""Full tensors for optimizers that are not elementwise: sums over full parameters, and full matrices.

Such an optimizer (`Lamb`, `Muon`) has an attribute `whole`. By default it is `LocalFullTensors`: the tensors that the
optimizer steps are the parameters. Over shards it is `ShardedFullTensors`, which knows the ranks that hold the other
parts. Both methods, `sums` and `through`, are collective there: a step calls each method that it needs exactly once,
also if this rank holds no part of anything.
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
    """Whether the optimizer is not elementwise, so that its steps over shards need collectives."""
    return hasattr(optimizer, "whole")


@dataclass(frozen=True)
class SlicePosition:
    """The parameter that a tensor of the optimizer is a part of."""

    index: int  # the parameter's number, the same on every rank
    shape: tuple[int, ...]  # ND, of the full parameter


class FullTensors(Protocol):
    """Access to full parameters, for an optimizer that steps parts of them."""

    def place(self, tensor: Tensor) -> SlicePosition:
        """Return the parameter that a tensor of the optimizer belongs to."""

    def sums(self, parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return, for each (tensor of the optimizer, 1D partial sums), the sums over all parts of its parameter.

        Every entry has the same number of sums.
        """

    def through(self, parts: list[tuple[Tensor, Tensor]], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return, for each (tensor of the optimizer, values of the same numel), its part of `function(full values)`.

        `function` takes a parameter in its full shape in bf16 (values are rounded before they are sent, as torch
        rounds), does not change it and returns another tensor. The work is spread over the ranks, and each parameter is
        computed once.
        """


class LocalFullTensors:
    """Full tensors without sharding: every tensor is a full parameter."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def place(self, tensor: Tensor) -> SlicePosition:
        return SlicePosition(self._numbers.setdefault(id(tensor), len(self._numbers)), tuple(tensor.shape))

    def sums(self, parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [sums for _, sums in parts]

    def through(self, parts: list[tuple[Tensor, Tensor]], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [function(values.bfloat16()) for _, values in parts]


class ShardedFullTensors:
    """Full tensors of sharded parameters: their parts are summed, or sent to one rank each and back."""

    def __init__(self, shards: ParamSlices, inner: Optimizer, comm: Collectives) -> None:
        self._shards, self._inner, self._comm = shards, inner, comm
        self._groups: list[ShardedGroup] = []
        self._unseen: set[str] = set()

    def begin(self, groups: list[ShardedGroup], unseen: set[str]) -> None:
        """Set the groups of the next step, and the parameters that it leaves out; the same on every rank."""
        self._groups, self._unseen = groups, unseen
        self._by_tensor = {id(shard.tensor): shard for shard in self._shards}

    def _shard(self, tensor: Tensor) -> ParamSlice:
        return self._by_tensor[id(tensor)]

    def place(self, tensor: Tensor) -> SlicePosition:
        slot = self._shard(tensor).pieces[0].slot
        return SlicePosition(self._shards.numbers[slot.name], slot.shape)

    def sums(self, parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        if not any(group.spec.optimizer.axis for group in self._groups):
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
        swap = _Swap(self._comm, split, balance([_cost(matrix.slot) for matrix in split], self._comm.rank_group.size))
        wholes = swap.collect(mine, self._where)
        for matrix in matrices:
            if not matrix.is_split:  # every rank has it, and computes it redundantly
                wholes[matrix.slot.name] = mine[matrix.slot.name].bfloat16()
            if matrix.slot.name in wholes:
                view = wholes[matrix.slot.name].as_strided(matrix.slot.shape, matrix.slot.stride)
                view.copy_(function(view.contiguous()))
        answers = wholes | swap.give_back(wholes, self._where)
        return [answers[self._name(tensor)] for tensor, _ in parts]

    def _name(self, tensor: Tensor) -> str:
        return self._shard(tensor).pieces[0].slot.name

    def _matrices(self) -> Iterator[_Matrix]:
        """Yield the parameters of this step that are needed in full, each with the rank of every part."""
        wants_whole: Callable[[dict[str, object]], bool] = self._inner.wants_whole  # type: ignore[attr-defined]
        for group in self._groups:
            is_split = group.spec.optimizer.axis is not None
            places = [self._comm.shard_index_of(rank) for rank in range(self._comm.rank_group.size)]
            held = [list(group.layout.pieces(place)) for place in places] if is_split else []
            for slot in group.layout.slots:
                label = self._shards.labels[slot.name]
                if label >= 0 and slot.name not in self._unseen and wants_whole(self._inner.param_groups[label]):
                    _check_matrix(slot)
                    parts = [[piece for piece in pieces if piece.slot is slot] for pieces in held]
                    yield _Matrix(slot, is_split, [found[0] if found else None for found in parts])


_NUM_SUMS = 4  # the most sums that an optimizer asks for in one call


@dataclass(frozen=True)
class _Matrix:
    slot: Slot
    is_split: bool
    held: list[SlotPiece | None]  # by rank


@dataclass(frozen=True)
class _Swap:
    """The exchange of parts of matrices with the ranks that compute them."""

    comm: Collectives
    matrices: list[_Matrix]
    owners: list[int]

    def _crossing(self, holder: int, owner: int) -> list[tuple[_Matrix, SlotPiece]]:
        """Return the parts that rank `holder` has of the matrices of rank `owner`, in order."""
        return [
            (matrix, piece)
            for matrix, its_owner in zip(self.matrices, self.owners, strict=True)
            if its_owner == owner and (piece := matrix.held[holder]) is not None
        ]

    def collect(self, mine: dict[str, Tensor], where: torch.device) -> dict[str, Tensor]:
        """Send this rank's parts to their owners, and return the matrices (flat) that this rank owns."""
        rank, ranks = self.comm.rank_group.rank, range(self.comm.rank_group.size)
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
            for (matrix, piece), part in zip(crossing, _split(incoming[holder], crossing), strict=True):
                wholes[matrix.slot.name][piece.in_parameter : piece.in_parameter + piece.numel] = part
        return wholes

    def give_back(self, wholes: dict[str, Tensor], where: torch.device) -> dict[str, Tensor]:
        """Send each rank its part of the results, and return this rank's parts."""
        rank, ranks = self.comm.rank_group.rank, range(self.comm.rank_group.size)
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
            for (matrix, _), part in zip(crossing, _split(incoming[owner], crossing), strict=True):
                answers[matrix.slot.name] = part
        return answers


def balance(costs: list[float], num_ranks: int) -> list[int]:
    """Assign work to ranks: the most expensive first, each to the rank with the least load."""
    load = [0.0] * num_ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = load.index(min(load))
        load[owners[index]] += costs[index]
    return owners


def _check_matrix(slot: Slot) -> None:
    if len(slot.shape) < 2:
        raise ShardwellError(f"'{slot.name}' has shape {list(slot.shape)} and is needed as a full matrix")


def _cost(slot: Slot) -> float:
    """Return the cost of the orthogonalisation, up to a factor."""
    return float(slot.numel * min(slot.shape[-2:]))


def _joined(parts: list[Tensor], where: torch.device) -> Tensor:
    if not parts:
        return torch.empty(0, dtype=torch.bfloat16, device=where)
    return torch.cat([part.bfloat16() for part in parts])


def _room(crossing: list[tuple[_Matrix, SlotPiece]], where: torch.device) -> Tensor:
    return torch.empty(sum(piece.numel for _, piece in crossing), dtype=torch.bfloat16, device=where)


def _split(joined: Tensor, crossing: list[tuple[_Matrix, SlotPiece]]) -> list[Tensor]:
    return list(joined.split([piece.numel for _, piece in crossing])) if crossing else []
