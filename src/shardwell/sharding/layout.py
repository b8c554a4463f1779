"""The arithmetic of a flat buffer: which element of which parameter sits where, and which slice belongs to which rank.

Pure values and pure functions. This module knows no storage, no process group and no device: a layout computed for
rank 5 of 1,024 on a laptop is the layout that rank 5 will use.

    parameters      | w (12) ........ | b (3) | g (1) | pad |
    flat buffer     0                12      15      16    24
    shards (3)      | shard 0         | shard 1 | shard 2   |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

# A shard starts on a multiple of this many elements, so that vector loads and tensor-core operands stay aligned
# (16 bytes for 16-bit types). A parameter does too, unless an oddly sized one stands before it.
ALIGNMENT = 8


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer."""

    name: str
    shape: tuple[int, ...]  # ND, the true shape
    stride: tuple[int, ...]  # ND, the strides of the view
    offset: int  # first element in the flat buffer
    numel: int
    label: int = 0  # what the optimizer calls a parameter group

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class SlotPiece:
    """The part of a parameter that lies in one shard, in elements."""

    slot: Slot
    in_shard: int  # first element, counted from the shard's start
    in_parameter: int  # first element, counted from the parameter's start
    numel: int


@dataclass(frozen=True)
class ParamGroupSpan:
    """A stretch of one shard whose parameters all carry the same label; padding belongs to no run."""

    label: int
    start: int  # counted from the shard's start
    numel: int
    pieces: tuple[SlotPiece, ...]


@dataclass(frozen=True)
class TensorSpec:
    """What a layout needs to know of a parameter."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None  # None: contiguous
    label: int = 0

    @classmethod
    def dense(cls, name: str, shape: Sequence[int], stride: Sequence[int], label: int = 0) -> TensorSpec:
        """Of a parameter that lies in memory by these strides; gaps are left out."""
        return cls(name, tuple(shape), dense_stride(tuple(shape), tuple(stride)), label)

    @property
    def numel(self) -> int:
        return product(self.shape)


@dataclass(frozen=True)
class Layout:
    """Parameters back to back, padded to `num_shards` equal shards."""

    slots: tuple[Slot, ...]
    num_shards: int
    numel: int  # without padding
    padded: int

    @property
    def shard_numel(self) -> int:
        return self.padded // self.num_shards

    def shard_range(self, index: int) -> tuple[int, int]:
        """The half-open range of shard `index` in the flat buffer."""
        return index * self.shard_numel, (index + 1) * self.shard_numel

    def pieces(self, index: int) -> Iterator[SlotPiece]:
        """The parts of parameters that shard `index` holds, in order; together they are the shard less its padding."""
        start, end = self.shard_range(index)
        for slot in self.slots:
            low, high = max(slot.offset, start), min(slot.end, end)
            if low < high:
                yield SlotPiece(slot, low - start, low - slot.offset, high - low)

    def runs(self, index: int) -> list[ParamGroupSpan]:
        """Shard `index` cut where the label changes: what the optimizer sees as its parameters."""
        found = []
        for label, group in groupby(self.pieces(index), key=lambda piece: piece.slot.label):
            pieces = tuple(group)
            found.append(ParamGroupSpan(label, pieces[0].in_shard, sum(piece.numel for piece in pieces), pieces))
        return found


def make_layout(specs: Sequence[TensorSpec], num_shards: int, alignment: int = ALIGNMENT) -> Layout:
    """Place parameters so that no padding stands between them.

    Sizes that keep the alignment come first, the odd ones after them; among each, equal labels stand together so that
    a shard has few runs. The order is otherwise that of `specs`. All padding is at the end.
    """
    ordered = sorted(specs, key=lambda spec: (spec.numel % alignment != 0, spec.label))
    slots, offset = [], 0
    for spec in ordered:
        stride = spec.stride if spec.stride is not None else contiguous_stride(spec.shape)
        slots.append(Slot(spec.name, spec.shape, stride, offset, spec.numel, spec.label))
        offset += spec.numel
    shard = round_up(-(-offset // num_shards), alignment)
    return Layout(tuple(slots), num_shards, offset, shard * num_shards)


def even_part(numel: int, num_parts: int, alignment: int = ALIGNMENT) -> int:
    """How many of the first elements divide into equal parts that all start aligned."""
    return numel - numel % (num_parts * alignment)


def product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """`stride` if it fills memory without gaps or overlap (a transposed or channels-last tensor), else contiguous."""
    step = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], shape[dim])):
        if shape[dim] == 1:
            continue
        if stride[dim] != step:
            return contiguous_stride(shape)
        step *= shape[dim]
    return tuple(stride)
