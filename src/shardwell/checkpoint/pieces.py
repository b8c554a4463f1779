"""The tensors of a checkpoint and the pieces that hold them, as a manifest lists them.

A piece is a range of a tensor's flat elements. If ranks held boxes of the tensor (columns, say), it is a range of the
elements of a box, and then all pieces of that tensor are: `BoxPiece`.

    flat    | piece 0 (5)         | piece 1 (7)                 |

    boxes   | piece 0 | piece 2 |   of the left box elements 0 to 4 and 4 to 6,
            | piece 1 | piece 3 |   of the right box, too

This module has pure values and functions. What a piece says is not trusted: `check_tiling` raises unless every element
of the tensor is in exactly one piece.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import add, eq, itemgetter
from typing import Any, NamedTuple, overload

import torch

from shardwell.checkpoint.boxes import Box, Region, cut_dims, find_mistiled, order_of, reordered
from shardwell.checkpoint.parsing import LIMIT, is_size, show
from shardwell.errors import CheckpointError
from shardwell.sharding.layout import product

MAX_BOXES = 2**16  # different boxes of one tensor
MAX_CUT_DIMS = 4  # dimensions in which a tensor is cut into boxes: the work of a check doubles with each


@dataclass(frozen=True)
class FilePiece:
    """A range of a tensor's elements, which a file holds under a key."""

    file: str
    key: str
    start: int  # first element, counted from the tensor's start; of a `BoxPiece`, from the start of its box
    numel: int

    @property
    def end(self) -> int:
        return self.start + self.numel


class FlatPieces(Sequence[FilePiece]):
    """Flat pieces of a tensor, by columns: a tensor may have one from each of thousands of ranks.

    What a column has was read from a file, and may be anything until `is_plain` has looked at it.
    """

    def __init__(
        self,
        files: Sequence[str] = (),
        keys: Sequence[str] = (),
        starts: Sequence[int] = (),
        numels: Sequence[int] = (),
    ) -> None:
        self.files, self.keys, self.starts, self.numels = files, keys, starts, numels

    @classmethod
    def of(cls, pieces: Sequence[FilePiece]) -> FlatPieces:
        """Return pieces by columns; those that are already are returned as they are."""
        if isinstance(pieces, FlatPieces):
            return pieces
        if len(pieces) == 1:  # of the part of one rank
            (one,) = pieces
            return cls((one.file,), (one.key,), (one.start,), (one.numel,))
        return cls(
            tuple(one.file for one in pieces),
            tuple(one.key for one in pieces),
            tuple(one.start for one in pieces),
            tuple(one.numel for one in pieces),
        )

    @cached_property
    def is_plain(self) -> bool:
        """Whether names are texts and sizes are possible; looks at all of them at once."""
        if set(map(type, chain(self.files, self.keys))) - {str} or set(map(type, chain(self.starts, self.numels))) - {
            int
        }:
            return False
        return (
            min(chain(self.starts, self.numels), default=0) >= 0
            and max(chain(self.starts, self.numels), default=0) < LIMIT
        )

    def tile(self, numel: int) -> bool:
        """Return whether the pieces are plain and follow one another from the first element to the last of `numel`."""
        if not self.is_plain or not self.numels or min(self.numels) == 0:
            return False
        ends = list(map(add, self.starts, self.numels))
        return self.starts[0] == 0 and ends[-1] == numel and all(map(eq, self.starts[1:], ends))

    def in_order(self) -> FlatPieces:
        """Return the pieces by their first elements."""
        if not self.is_plain or list(self.starts) == sorted(self.starts):
            return self
        rows = sorted(zip(self.files, self.keys, self.starts, self.numels, strict=True), key=itemgetter(2))
        return FlatPieces(*zip(*rows, strict=True))

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> FilePiece: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[FilePiece, ...]: ...

    def __getitem__(self, index: int | slice) -> FilePiece | tuple[FilePiece, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(len(self))))
        return FilePiece(self.files[index], self.keys[index], self.starts[index], self.numels[index])

    def __iter__(self) -> Iterator[FilePiece]:
        return map(FilePiece, self.files, self.keys, self.starts, self.numels)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (FlatPieces, tuple)) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True)
class BoxPiece(FilePiece):
    """A range of the elements of a box of a tensor, in the order of the tensor's strides."""

    offsets: tuple[int, ...]  # ND, where in the tensor the box begins
    sizes: tuple[int, ...]  # ND, of the box


@dataclass(frozen=True)
class PiecesOfBox:
    """A box of a tensor, with dimensions in the order of memory, and the pieces that hold it, in order."""

    box: Box
    pieces: tuple[BoxPiece, ...]

    def touching(self, target: Region) -> Iterator[tuple[BoxPiece, Region]]:
        """Yield the pieces that may have something in common with a region, each with its own region."""
        span = target.span_in(self.box)
        if span is None:
            return
        first = max(bisect_right(self.pieces, span[0], key=lambda piece: piece.start) - 1, 0)
        last = bisect_left(self.pieces, span[1], key=lambda piece: piece.start)
        for piece in self.pieces[first:last]:
            yield piece, Region(self.box, piece.start, piece.end)


@dataclass(frozen=True)
class TensorRecord:
    """A tensor, and the pieces that hold it. An empty tensor has none. Either all pieces are of boxes, or none is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # the order of the flat elements in memory
    kind: str  # "parameter", "state:exp_avg"
    pieces: Sequence[FilePiece]  # in order

    @property
    def numel(self) -> int:
        return product(self.shape)

    @property
    def is_boxed(self) -> bool:
        """Return whether the pieces are of boxes."""
        return bool(self.pieces) and isinstance(self.pieces[0], BoxPiece)

    @cached_property
    def boxes(self) -> tuple[PiecesOfBox, ...]:
        """The boxes of a tensor with such pieces."""
        order = order_of(self.stride)
        found: defaultdict[tuple[tuple[int, ...], tuple[int, ...]], list[BoxPiece]] = defaultdict(list)
        for piece in _box_pieces(self.pieces):
            found[piece.offsets, piece.sizes].append(piece)
        return tuple(
            PiecesOfBox(
                Box(reordered(offsets, order), reordered(sizes, order)),
                tuple(sorted(pieces, key=lambda piece: piece.start)),
            )
            for (offsets, sizes), pieces in found.items()
        )


class FileExtent(NamedTuple):
    """Elements `first` to `last` (excluded) of the tensor that a file holds under a key."""

    file: str
    key: str
    first: int
    last: int


def plan(record: TensorRecord, start: int, stop: int) -> list[FileExtent]:
    """Return the extents to read for elements `start` to `stop` of a tensor without boxes, in order."""
    check_range(record, start, stop)
    extents: list[FileExtent] = []
    index = max(bisect_right(record.pieces, start, key=lambda piece: piece.start) - 1, 0)
    while start < stop:
        piece = record.pieces[index]
        last = min(stop, piece.end)
        extents.append(FileExtent(piece.file, piece.key, start - piece.start, last - piece.start))
        start, index = last, index + 1
    return extents


def check_range(record: TensorRecord, start: int, stop: int) -> None:
    """Raise unless a tensor has elements `start` to `stop`."""
    if not 0 <= start <= stop <= record.numel:
        raise CheckpointError(f"a {record.kind} of {record.numel} elements: asked for {start} to {stop}")


def merge_boxes(records: Sequence[TensorRecord], pieces: Sequence[FilePiece], where: str) -> TensorRecord:
    """Return the record of a tensor of which ranks saved boxes, with the pieces of all ranks.

    If every box is a range of the flat tensor (rows, say), the pieces become such ranges: readers that know no boxes
    can read them.
    """
    of_boxes = list(_box_pieces(pieces))
    if len(of_boxes) < len(pieces):
        raise CheckpointError(f"{where}.pieces: ranks disagree: a box for some, and all of the tensor for others")
    of_boxes.sort(key=lambda piece: (piece.offsets, piece.sizes, piece.start))
    boxed = replace(records[0], stride=_common_stride(records, where), pieces=tuple(of_boxes))
    order = order_of(boxed.stride)
    whole = Box((0,) * len(order), reordered(boxed.shape, order))
    if not all(one.box.is_range_of(whole.sizes) for one in boxed.boxes):
        return boxed
    starts = [(whole.position(one.box.offsets), one.pieces) for one in boxed.boxes]
    flat = [FilePiece(p.file, p.key, start + p.start, p.numel) for start, found in starts for p in found]
    return replace(boxed, pieces=tuple(sorted(flat, key=lambda piece: piece.start)))


def _common_stride(records: Sequence[TensorRecord], where: str) -> tuple[int, ...]:
    """Return strides that describe the order of elements in the boxes of all ranks.

    The order of dimensions in which a box has one index does not show in its memory, so ranks may differ in it.
    """
    strides = list(dict.fromkeys(record.stride for record in records))
    if len(strides) == 1:
        return strides[0]
    used = {(record.stride, piece.sizes) for record in records for piece in _box_pieces(record.pieces)}
    for stride in strides:
        if all(_long_dims(stride, sizes) == _long_dims(other, sizes) for other, sizes in used):
            return stride
    raise CheckpointError(f"{where}.stride: ranks disagree: {strides[0]} and {strides[1]}")


def _long_dims(stride: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the dimensions in which a box has several indices, in the order of strides of the tensor."""
    return [dim for dim in order_of(stride) if sizes[dim] > 1]


# --- checking ---------------------------------------------------------------------------------------------------


def check_tiling(record: TensorRecord, where: str, part: bool) -> None:
    """Raise unless every element is in one piece; in a part of a manifest, unless none is in two."""
    if record.is_boxed:
        _check_boxes(record, where, part)
        return
    if isinstance(record.pieces, FlatPieces) and record.pieces.tile(record.numel):
        return  # else what is wrong is looked for, one by one
    reached = 0
    for index, piece in enumerate(record.pieces):
        if not is_size(piece.start) or not is_size(piece.numel):  # messages are made only if needed: pieces are many
            check_size(piece.start, f"{where}.pieces[{index}].start")
            check_size(piece.numel, f"{where}.pieces[{index}].numel")
        if piece.numel == 0 or piece.end > record.numel:
            raise CheckpointError(
                f"{where}.pieces[{index}]: elements {piece.start} to {piece.end} of {record.numel}; "
                "expected at least one, and none beyond the end"
            )
        if piece.start < reached:
            raise CheckpointError(
                f"{where}.pieces[{index}]: starts at element {piece.start}, but the pieces before it reach {reached}"
            )
        if piece.start > reached and not part:
            raise CheckpointError(f"{where}.pieces[{index}]: elements {reached} to {piece.start} are in no piece")
        reached = piece.end
    if reached < record.numel and not part:
        raise CheckpointError(f"{where}.pieces: elements {reached} to {record.numel} are in no piece")


def check_size(value: Any, where: str) -> None:
    """Raise unless a value is a possible size."""
    if not is_size(value):
        raise CheckpointError(f"{where}: expected a whole number from 0 to 2**63, found {show(value)}")


def _check_boxes(record: TensorRecord, where: str, part: bool) -> None:
    """Raise unless the boxes tile the tensor, and the pieces of each box tile the box."""
    for index, piece in enumerate(record.pieces):
        _check_box_piece(piece, record.shape, f"{where}.pieces[{index}]")
    if len(record.boxes) > MAX_BOXES:
        raise CheckpointError(f"{where}.pieces: {len(record.boxes)} different boxes; expected at most {MAX_BOXES}")
    for one in record.boxes:
        _check_pieces_of_box(one, where, part)
    if part:
        return
    boxes = [Box(one.pieces[0].offsets, one.pieces[0].sizes) for one in record.boxes]
    dims = len(cut_dims(record.shape, boxes))
    if dims > MAX_CUT_DIMS:
        raise CheckpointError(f"{where}.pieces: boxes cut {dims} dimensions; expected at most {MAX_CUT_DIMS}")
    mistiled = find_mistiled(record.shape, boxes)
    if mistiled is not None:
        element, count = mistiled
        found = f"{count} boxes" if count else "no box"
        raise CheckpointError(f"{where}.pieces: element {show(element)} is in {found}; expected one")


def _check_box_piece(piece: FilePiece, shape: tuple[int, ...], where: str) -> None:
    """Raise unless a piece is a range of a box, and the box is inside of the tensor."""
    if not isinstance(piece, BoxPiece):
        raise CheckpointError(f"{where}: expected a piece of a box, as the others are")
    for name, sizes in (("offsets", piece.offsets), ("sizes", piece.sizes)):
        if len(sizes) != len(shape) or not all(is_size(size) for size in sizes):
            raise CheckpointError(f"{where}.{name}: expected {len(shape)} sizes, found {show(sizes)}")
    if 0 in piece.sizes or any(a + b > c for a, b, c in zip(piece.offsets, piece.sizes, shape, strict=True)):
        raise CheckpointError(
            f"{where}: a box of {show(piece.sizes)} at {show(piece.offsets)} of {show(shape)}; "
            "expected at least one element, and none beyond the end"
        )
    check_size(piece.start, f"{where}.start")
    check_size(piece.numel, f"{where}.numel")
    numel = product(piece.sizes)
    if piece.numel == 0 or piece.end > numel:
        raise CheckpointError(
            f"{where}: elements {piece.start} to {piece.end} of the {numel} of its box; "
            "expected at least one, and none beyond the end"
        )


def _check_pieces_of_box(one: PiecesOfBox, where: str, part: bool) -> None:
    first = one.pieces[0]
    where = f"{where}.pieces: the box of {show(first.sizes)} at {show(first.offsets)}"
    reached = 0
    for piece in one.pieces:
        if piece.start < reached:
            raise CheckpointError(f"{where}: elements {piece.start} to {reached} are in two pieces")
        if piece.start > reached and not part:
            raise CheckpointError(f"{where}: elements {reached} to {piece.start} are in no piece")
        reached = piece.end
    if reached < one.box.numel and not part:
        raise CheckpointError(f"{where}: elements {reached} to {one.box.numel} are in no piece")


def _box_pieces(pieces: Sequence[FilePiece]) -> Iterator[BoxPiece]:
    return (piece for piece in pieces if isinstance(piece, BoxPiece))
