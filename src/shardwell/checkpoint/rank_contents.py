"""The tensors that a rank saves: its slices of masters and optimizer state, and on one rank the buffers.

Each group of parameters is divided over the ranks by its own layout, also where every rank holds all of it: all ranks
write an equal share, and no element is written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.checkpoint.boxes import order_of, stride_in_order
from shardwell.checkpoint.files import Entry
from shardwell.checkpoint.pieces import BoxPiece, FilePiece, TensorRecord
from shardwell.checkpoint.sources import MODEL, SCALAR, STATE
from shardwell.kernels import Moment8bit
from shardwell.optim import ShardedOptimizer
from shardwell.optim.odd_state import state_to_json
from shardwell.optim.param_slices import is_elementwise, odd_keys
from shardwell.sharding import ShardedGroup, Unit, released
from shardwell.sharding.layout import Slot, dense_stride


@dataclass(frozen=True)
class SavedPiece:
    """A slice of a tensor that this rank saves."""

    name: str
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the full tensor
    stride: tuple[int, ...]
    start: int  # its first element in the full tensor, or in the box
    numel: int
    read: Callable[[], Tensor]  # 1D, in place; valid until the next slice is read
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # offsets and sizes, if it is a slice of a box
    number: int = 0  # among the slices of the tensor that this rank saves

    @classmethod
    def of(
        cls, slot: Slot, name: str, kind: str, dtype: torch.dtype, where: tuple[int, int], read: Callable[[], Tensor]
    ) -> Iterator[SavedPiece]:
        """Yield the slices of a parameter's slice; `where` is its first element in the parameter, and its length."""
        if not is_part(slot):
            yield cls(name, kind, dtype, slot.shape, slot.stride, *where, read)
            return
        shape = slot.box[0]
        stride, at = stride_in_order(shape, order_of(slot.stride)), 0
        for number, one in enumerate(slot.boxes(*where)):
            part = read if one.numel == where[1] else partial(_slice_of, read, at, one.numel)
            box = one.offsets, one.sizes
            yield cls(name, kind, dtype, shape, stride, one.start, one.numel, part, box, number)
            at += one.numel

    @property
    def key(self) -> str:
        """The name of the slice in its file."""
        return f"{self.name}/{self.number}" if self.number else self.name

    def record(self, file: str) -> TensorRecord:
        pieces: tuple[FilePiece, ...] = ()
        if self.numel and self.box is not None:
            pieces = (BoxPiece(file, self.key, self.start, self.numel, *self.box),)
        elif self.numel:
            pieces = (FilePiece(file, self.key, self.start, self.numel),)
        return TensorRecord(self.dtype, self.shape, self.stride, self.kind, pieces)

    @property
    def entry(self) -> Entry:
        return Entry(self.key, self.dtype, (self.numel,))

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class RankContents:
    """All slices of this rank, by their names in its file, and the scalars of the optimizer's state."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        optimizer: ShardedOptimizer | None,
        *,
        rank: int,
        exclude_frozen: bool = False,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Collect what a rank saves; it saves these buffers for all ranks, by default all of them on rank 0."""
        self.parts: dict[str, SavedPiece] = {}
        self.scalars: dict[str, Any] = {}
        self._rank = rank
        self._open = ExitStack()
        odd = odd_keys(optimizer.shards, optimizer.state) if optimizer is not None else set()
        self._opened: ShardedGroup | Unit | None = None  # a group's masters, or a unit's state, are readable
        for unit in units:
            unit.wait()
            unit.take_over_edits()
            for group in unit.groups:
                if group.trainable or not exclude_frozen:
                    self._add_masters(group)
            if optimizer is not None and unit.trainable:
                self._add_states(unit, optimizer, odd)
        if buffers is None:
            buffers = buffers_of(model) if rank == 0 else {}
        for name, buffer in buffers.items():
            self.add(MODEL + name, "buffer", buffer)

    def add(self, name: str, kind: str, tensor: Tensor) -> None:
        """Add a full tensor that this rank saves."""
        shape = tuple(tensor.shape)
        stride = dense_stride(shape, tensor.stride())
        same = tensor.detach().as_strided(shape, stride) if tensor.is_contiguous() else _laid_out(tensor, stride)
        flat = same.as_strided((tensor.numel(),), (1,))
        self.parts[name] = SavedPiece(name, kind, tensor.dtype, shape, stride, 0, tensor.numel(), lambda: flat)

    def close(self) -> None:
        """Put masters and optimizer state back to where they are stored."""
        self._opened = None
        self._open.close()

    def _hold(self, what: ShardedGroup | Unit, opening: Callable[[], AbstractContextManager[object]]) -> None:
        """Enter a context that makes values readable, and leave the one before."""
        if self._opened is not what:
            self.close()
            self._open.enter_context(opening())
            self._opened = what

    def _add_masters(self, group: ShardedGroup) -> None:
        dtype = group.precision.master
        for slot, at, start, numel in self._share(group):
            read = self._reader_of_masters(group, at, numel)
            name = MODEL + slot.name
            self._add_slices(SavedPiece.of(slot, name, "parameter", dtype, (start, numel), read))
        for slot in group.layout.slots:
            if not slot.numel and self._rank == 0 and 0 in slot.box[0]:  # else it is an empty box of what others save
                self.add(MODEL + slot.name, "parameter", torch.empty(slot.box[0], dtype=dtype, device="cpu"))

    def _share(self, group: ShardedGroup) -> Iterator[tuple[Slot, int, int, int]]:
        """Yield this rank's slices: slot, first element in its masters, first element in the parameter, length."""
        if not group.context.roles.is_first_replica or (group.tied is not None and group.tied.rank > 0):
            return
        place = group.context.roles.shard.shard_index
        first = group.layout.shard_range(place)[0] - group.local_range[0]
        for piece in group.layout.pieces(place):
            yield piece.slot, first + piece.in_shard, piece.in_parameter, piece.numel

    def _reader_of_masters(self, group: ShardedGroup, at: int, numel: int) -> Callable[[], Tensor]:
        def read() -> Tensor:
            self._hold(group, group.storage.open)
            return group.master[at : at + numel]

        return read

    def _add_states(self, unit: Unit, optimizer: ShardedOptimizer, odd: set[str]) -> None:
        shares = {slot.name: (at, start, n) for g in unit.trainable for slot, at, start, n in self._share(g)}
        for shard in optimizer.shards.of(unit):
            usual = optimizer.scalar(shard.tensor, None, 0.0)
            for key, value in optimizer.state.get(shard.tensor, {}).items():
                has_each = is_elementwise(value, shard) and key not in odd
                for piece in shard.pieces:
                    at, start, numel = shares.get(piece.slot.name, (0, 0, 0))
                    if numel and has_each:
                        read = self._reader_of_state(unit, optimizer, value, at - shard.start, numel)
                        self._add_state(piece.slot, key, value.dtype, (start, numel), read)
                    elif numel and start == 0:
                        name = f"{SCALAR}{piece.slot.name}/{key}"
                        self.scalars[name] = state_to_json(value, usual, name)

    def _reader_of_state(
        self, unit: Unit, optimizer: ShardedOptimizer, value: Tensor | Moment8bit, first: int, numel: int
    ) -> Callable[[], Tensor]:
        def read() -> Tensor:
            self._hold(unit, lambda: optimizer.states_of(unit))
            return value[first : first + numel]

        return read

    def _add_state(
        self, slot: Slot, key: str, dtype: torch.dtype, where: tuple[int, int], read: Callable[[], Tensor]
    ) -> None:
        """Add one entry of the optimizer state; `where` is the first element in the parameter and the length."""
        name = f"{STATE}{slot.name}/{key}"
        self._add_slices(SavedPiece.of(slot, name, "state", dtype, where, read))

    def _add_slices(self, slices: Iterator[SavedPiece]) -> None:
        self.parts.update((one.key, one) for one in slices)

    def records(self, file: str) -> dict[str, TensorRecord]:
        """Return what the manifest says about each tensor of which this rank saves slices."""
        found: dict[str, TensorRecord] = {}
        for part in self.parts.values():
            record, known = part.record(file), found.get(part.name)
            found[part.name] = record if known is None else replace(known, pieces=(*known.pieces, *record.pieces))
        return found


def _slice_of(read: Callable[[], Tensor], at: int, numel: int) -> Tensor:
    return read()[at : at + numel]


def is_part(slot: Slot) -> bool:
    """Tell whether a parameter is a box of a larger tensor."""
    return slot.global_shape is not None and slot.global_shape != slot.shape


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the model's state dict that are not parameters of units."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and not _is_kept(v)}


def _is_kept(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and released.is_owned(tensor)


def extra_state_of(model: nn.Module) -> dict[str, Any]:
    """Return the extra state of modules that is not a tensor."""
    return {k: v for k, v in model.state_dict(keep_vars=True).items() if not isinstance(v, Tensor)}


def aliases_of(model: nn.Module, units: Sequence[Unit]) -> dict[str, str]:
    """Return {other name: saved name} of parameters that several modules share."""
    names = {
        id(parameter): slot.name
        for unit in units
        for group in unit.groups
        for slot, parameter in zip(group.layout.slots, group.parameters, strict=True)
    }
    every = model.named_parameters(remove_duplicate=False)
    return {name: names[id(p)] for name, p in every if id(p) in names and names[id(p)] != name}


def _laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the values contiguously in that order; the tensor itself if it already is."""
    if tuple(tensor.stride()) == stride:
        return tensor.detach()
    copy = torch.empty_strided(tuple(tensor.shape), stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())
