"""The layout of a flat buffer: the place of each parameter in it, and the slice of each rank.

The module has only pure values and pure functions. It knows no storage, no process group and no device: the layout that
a laptop computes for rank 5 of 1,024 is the layout that rank 5 will use.

    parameters      | w (12) ........ | b (3) | g (1) | pad |
    flat buffer     0                12      15      16    24
    shards (3)      | shard 0         | shard 1 | shard 2   |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

# A shard starts on a multiple of this many elements, so that vector loads and tensor-core operands stay aligned (16
# bytes for 16-bit types). A parameter does too, unless a parameter of a size that is no multiple precedes it.
ALIGNMENT = 8


@dataclass(frozen=True)
class Packed:
    """The ranges of a larger tensor that a parameter holds one after the other along a dimension; see `TensorPart`."""

    dim: int
    ranges: tuple[tuple[int, int], ...]  # half-open; none is empty


class SlotBox(NamedTuple):
    """Elements `start` to `start + numel` of a box of a larger tensor."""

    offsets: tuple[int, ...]  # ND
    sizes: tuple[int, ...]  # ND
    start: int
    numel: int


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in the flat buffer."""

    name: str
    shape: tuple[int, ...]  # ND, the shape of the unsharded parameter
    stride: tuple[int, ...]  # ND, the strides of the view
    offset: int  # first element in the flat buffer
    numel: int
    label: int = 0  # index of the parameter group in the optimizer
    # ND, the box of a larger tensor that this parameter is a part of; by default the parameter is all of it
    global_shape: tuple[int, ...] | None = None
    global_offset: tuple[int, ...] | None = None
    packed: Packed | None = None  # it holds several ranges of that tensor, of which the offset is the first one's

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of the tensor that this parameter is a part of, and where in it the part begins (ND)."""
        offset = self.global_offset if self.global_offset is not None else (0,) * len(self.shape)
        return self.global_shape if self.global_shape is not None else self.shape, offset

    @property
    def end(self) -> int:
        """Return the offset behind the last element in the flat buffer."""
        return self.offset + self.numel

    def boxes(self, start: int, numel: int) -> Iterator[SlotBox]:
        """Yield the boxes of the larger tensor that elements of the parameter are in, in order; it is contiguous."""
        if self.packed is None:
            yield SlotBox(self.box[1], self.shape, start, numel)
            return
        dim, stop = self.packed.dim, start + numel
        ones, rest = (1,) * dim, self.shape[dim + 1 :]
        lengths = [(last - first) * product(rest) for first, last in self.packed.ranges]
        while start < stop:
            outer, inside = divmod(start, sum(lengths))
            number = 0
            while inside >= lengths[number]:
                inside, number = inside - lengths[number], number + 1
            first, last = self.packed.ranges[number]
            taken = min(lengths[number] - inside, stop - start)
            offsets = (*_unravelled(outer, self.shape[:dim]), first, *(0 for _ in rest))
            yield SlotBox(offsets, (*ones, last - first, *rest), inside, taken)
            start += taken


@dataclass(frozen=True)
class SlotPiece:
    """The part of a parameter that is in one shard, in elements."""

    slot: Slot
    in_shard: int  # first element, counted from the shard's start
    in_parameter: int  # first element, counted from the parameter's start
    numel: int


@dataclass(frozen=True)
class ParamGroupSpan:
    """A slice of one shard whose parameters all have the same label; padding belongs to no span."""

    label: int
    start: int  # counted from the shard's start
    numel: int
    pieces: tuple[SlotPiece, ...]


@dataclass(frozen=True)
class TensorSpec:
    """The name, shape, strides and label of a parameter, as a layout needs them."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None  # None: contiguous
    label: int = 0
    global_shape: tuple[int, ...] | None = None  # of the tensor that it is a part of; None: it is all of it
    global_offset: tuple[int, ...] | None = None  # where in that tensor it begins
    packed: Packed | None = None
    # whether all parts of the tensor are multiples of the alignment: their ranks have one order; None: as it is itself
    is_aligned: bool | None = None

    def __post_init__(self) -> None:
        if self.global_shape is None and self.global_offset is None:
            return
        whole = self.global_shape if self.global_shape is not None else self.shape
        first = self.global_offset if self.global_offset is not None else (0,) * len(whole)
        fits = len(whole) == len(first) == len(self.shape) and all(
            begin >= 0 and begin + size <= most for begin, size, most in zip(first, self.shape, whole, strict=True)
        )
        if not fits:
            raise ValueError(f"{self.name}: {self.shape} at {first} is no part of {whole}")

    @classmethod
    def dense(cls, name: str, shape: Sequence[int], stride: Sequence[int], label: int = 0) -> TensorSpec:
        """Return the spec of a parameter with these strides; if they leave gaps, the spec is contiguous."""
        return cls(name, tuple(shape), dense_stride(tuple(shape), tuple(stride)), label)

    @property
    def numel(self) -> int:
        return product(self.shape)


@dataclass(frozen=True)
class Layout:
    """Parameters back to back in one flat buffer, padded to `num_shards` equal shards."""

    slots: tuple[Slot, ...]
    num_shards: int
    numel: int  # without padding
    padded: int
    least: int = 0  # elements that the slots stand for, of a simulation that has few of many parameters

    @cached_property
    def shard_numel(self) -> int:
        """Return the number of elements of one shard, padding included."""
        return self.padded // self.num_shards

    def shard_range(self, index: int) -> tuple[int, int]:
        """Return the half-open range of shard `index` in the flat buffer."""
        return index * self.shard_numel, (index + 1) * self.shard_numel

    def pieces(self, index: int) -> Iterator[SlotPiece]:
        """Yield the parts of parameters that shard `index` holds, in order.

        Together they are the shard without its padding.
        """
        start, end = self.shard_range(index)
        for slot in self.slots:
            low, high = max(slot.offset, start), min(slot.end, end)
            if low < high:
                yield SlotPiece(slot, low - start, low - slot.offset, high - low)

    def runs(self, index: int) -> list[ParamGroupSpan]:
        """Return shard `index` split where the label changes: each span is one parameter of the optimizer."""
        found = []
        for label, group in groupby(self.pieces(index), key=lambda piece: piece.slot.label):
            pieces = tuple(group)
            found.append(ParamGroupSpan(label, pieces[0].in_shard, sum(piece.numel for piece in pieces), pieces))
        if self.least > self.numel and found:  # those that are left out follow the last one
            start, end = self.shard_range(index)
            found[-1] = replace(found[-1], numel=min(end, self.least) - start - found[-1].start)
        return found


def make_layout(specs: Sequence[TensorSpec], num_shards: int, alignment: int = ALIGNMENT, *, least: int = 0) -> Layout:
    """Place parameters so that there is no padding between them.

    Parameters whose size is a multiple of the alignment come first, the others follow. Within both, parameters with
    equal labels are adjacent, so that a shard has few spans. The order is otherwise that of `specs`. All padding is at
    the end, as much as `least` elements need.
    """

    def is_odd(spec: TensorSpec) -> bool:
        return spec.numel % alignment != 0 if spec.is_aligned is None else not spec.is_aligned

    ordered = sorted(specs, key=lambda spec: (is_odd(spec), spec.label))
    slots, offset = [], 0
    for spec in ordered:
        stride = spec.stride if spec.stride is not None else contiguous_stride(spec.shape)
        box = spec.global_shape, spec.global_offset, spec.packed
        slots.append(Slot(spec.name, spec.shape, stride, offset, spec.numel, spec.label, *box))
        offset += spec.numel
    needed = max(offset, least) if least else offset
    shard = round_up(-(-needed // num_shards), alignment)
    return Layout(tuple(slots), num_shards, offset, shard * num_shards, least)


def _unravelled(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the place of a flat index in a contiguous tensor of this shape."""
    found: list[int] = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        found.append(at)
    return tuple(reversed(found))


def even_part(numel: int, num_parts: int, alignment: int = ALIGNMENT) -> int:
    """Return how many of the first elements can be divided into equal parts that all start aligned."""
    return numel - numel % (num_parts * alignment)


def product(shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor of this shape."""
    result = 1
    for size in shape:
        result *= size
    return result


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return `stride` if it covers memory without gaps or overlap, else contiguous strides.

    Transposed and channels-last tensors keep their strides.
    """
    step = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], shape[dim])):
        if shape[dim] == 1:
            continue
        if stride[dim] != step:
            return contiguous_stride(shape)
        step *= shape[dim]
    return tuple(stride)
