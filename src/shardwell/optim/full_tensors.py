"""Full tensors for optimizers that are not elementwise: sums over full parameters, and full matrices.

Such an optimizer (`Lamb`, `Muon`) has an attribute `whole`. By default it is `LocalFullTensors`: the tensors that the
optimizer steps are the parameters. Over shards it is `ShardedFullTensors`, which knows the ranks that hold the other
parts. Both methods, `sums` and `through`, are collective there: a step calls each method that it needs exactly once,
also if this rank holds no part of anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell.errors import ShardwellError
from shardwell.optim.param_slices import ParamSlice, ParamSlices
from shardwell.parallel import Collectives, MeshRoles
from shardwell.sharding import ShardedGroup
from shardwell.sharding.layout import Slot, SlotPiece
from shardwell.sharding.tensor_part import TensorPart, part_of


def needs_full_tensors(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is not elementwise, so that its steps over shards need collectives."""
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

    def __init__(self, shards: ParamSlices, inner: Optimizer, roles: MeshRoles) -> None:
        self._shards, self._inner, self._roles = shards, inner, roles
        # over the ranks that hold the parts of a tensor: shards, and if tensors are cut, parts of the tensor axis
        self._wide = roles.shard if roles.alike is None else roles.alike.shard
        self._groups: list[ShardedGroup] = []
        self._unseen: set[str] = set()

    def begin(self, groups: list[ShardedGroup], unseen: set[str]) -> None:
        """Set the groups of the next step, and the parameters that it leaves out; the same on every rank."""
        self._groups, self._unseen = groups, unseen
        self._by_tensor = {id(shard.tensor): shard for shard in self._shards}

    def _shard(self, tensor: Tensor) -> ParamSlice:
        return self._by_tensor[id(tensor)]

    def place(self, tensor: Tensor) -> SlicePosition:
        shard = self._shard(tensor)
        slot = shard.pieces[0].slot
        parameter = shard.group.parameters[shard.group.layout.slots.index(slot)]
        part = part_of(parameter)
        return SlicePosition(self._shards.numbers[slot.name], slot.shape if part is None else part.shape)

    @property
    def _is_split(self) -> bool:
        """Whether the data axis splits the tensors of this step."""
        return any(group.spec.optimizer.axis for group in self._groups)

    def sums(self, parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        if not self._is_split and self._roles.parts is None:
            return [sums for _, sums in parts]
        width = _NUM_SUMS
        total = torch.zeros(len(self._shards.numbers), width, dtype=torch.float64, device=self._where)
        numbers = [self.place(tensor).index for tensor, _ in parts]
        for number, (tensor, sums) in zip(numbers, parts, strict=True):
            total[number, : len(sums)] += sums / self._num_holders(tensor)
        self._wide.all_reduce_sum(total, "SUMS")
        return [total[number, : len(sums)].to(sums) for number, (_, sums) in zip(numbers, parts, strict=True)]

    def _num_holders(self, tensor: Tensor) -> int:
        """Return how many ranks have the same part: those of the group's axis, if it splits nothing."""
        group = self._shard(tensor).group
        return 1 if group.spec.optimizer.axis is not None else group.context.roles.shard.rank_group.size

    @property
    def _where(self) -> torch.device:
        return self._groups[0].context.device.torch_device

    def through(self, parts: list[tuple[Tensor, Tensor]], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        mine = {self._name(tensor): values.reshape(-1) for tensor, values in parts}
        comm = self._wide if self._is_split or self._roles.parts is None else self._roles.parts
        matrices = list(self._matrices(comm))
        split = [matrix for matrix in matrices if matrix.is_split]
        swap = _Swap(comm, split, balance([_cost(matrix.slot) for matrix in split], comm.rank_group.size))
        wholes = swap.collect(mine, self._where)
        for matrix in matrices:
            if not matrix.is_split:  # every rank has it, and computes it redundantly
                wholes[matrix.slot.name] = mine[matrix.slot.name].bfloat16()
            if matrix.slot.name in wholes:
                matrix.apply(function, wholes[matrix.slot.name])
        answers = wholes | swap.give_back(wholes, self._where)
        return [answers[self._name(tensor)] for tensor, _ in parts]

    def _name(self, tensor: Tensor) -> str:
        return self._shard(tensor).pieces[0].slot.name

    def _matrices(self, comm: Collectives) -> Iterator[_Matrix]:
        """Yield the parameters of this step that are needed in full, each with what every rank holds of it."""
        wants_whole: Callable[[dict[str, object]], bool] = self._inner.wants_whole  # type: ignore[attr-defined]
        for group in self._groups:
            for slot, parameter in zip(group.layout.slots, group.parameters, strict=True):
                label = self._shards.labels[slot.name]
                if label >= 0 and slot.name not in self._unseen and wants_whole(self._inner.param_groups[label]):
                    part = part_of(parameter)
                    _check_matrix(slot, part)
                    is_split = group.spec.optimizer.axis is not None or part is not None
                    held = [self._held(group, slot, part, comm, rank) for rank in range(comm.rank_group.size)]
                    yield _Matrix(slot, is_split, held if is_split else [], part)

    def _held(
        self, group: ShardedGroup, slot: Slot, part: TensorPart | None, comm: Collectives, rank: int
    ) -> SlotPiece | None:
        """Return what a rank of `comm` holds of a parameter; in the memory of all parts, one after the other."""
        place, first = comm.shard_index_of(rank), 0
        if part is not None:
            grid = self._roles.grid
            at = grid.position(comm.rank_group.global_rank(rank))
            place, first = (
                at["shard"] * grid.sequence + at["sequence"],
                (at["expert"] * grid.tensor + at["tensor"]) * slot.numel,
            )
        if group.spec.optimizer.axis is None:
            return SlotPiece(slot, slot.offset, first, slot.numel)
        found = next((piece for piece in group.layout.pieces(place) if piece.slot is slot), None)
        return None if found is None else replace(found, in_parameter=first + found.in_parameter)


_NUM_SUMS = 4  # the most sums that an optimizer asks for in one call


@dataclass(frozen=True)
class _Matrix:
    slot: Slot
    is_split: bool
    held: list[SlotPiece | None]  # by rank
    part: TensorPart | None = None  # of a tensor that is cut over the tensor axis, into parts of the same shape

    @property
    def numel(self) -> int:
        """The number of elements of all parts."""
        return self.slot.numel * (1 if self.part is None else self.part.num_parts)

    def apply(self, function: Callable[[Tensor], Tensor], flat: Tensor) -> None:
        """Replace the flat values of all parts by those of `function` of the whole matrix."""
        slot = self.slot
        views = [part.as_strided(slot.shape, slot.stride) for part in flat.split(slot.numel)]
        if self.part is None:
            views[0].copy_(function(views[0].contiguous()))
            return
        found = function(self.part.join(views))
        for index, view in enumerate(views):
            view.copy_(replace(self.part, index=index).cut(found))


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
            matrix.slot.name: torch.empty(matrix.numel, dtype=torch.bfloat16, device=where)
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


def _check_matrix(slot: Slot, part: TensorPart | None) -> None:
    if len(slot.shape) < 2:
        raise ShardwellError(f"'{slot.name}' has shape {list(slot.shape)} and is needed as a full matrix")
    if part is not None and not part.is_even:
        raise ShardwellError(
            f"'{slot.name}' {list(part.shape)} is cut over {part.num_parts} ranks into uneven parts, and is needed as "
            "a full matrix: leave it out of the plan, or step it with another optimizer"
        )


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
