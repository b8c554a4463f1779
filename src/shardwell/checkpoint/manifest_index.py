"""What rank 0 tells the other ranks of a manifest that it has read and checked: an index, which is cheap to take over.

A rank needs where each tensor begins in each file, and of a few files their checksums. So the index has the pieces by
columns, and the texts of the files' records behind one another, of which a rank reads those that it asks for:

    {"values": ..., "files": {name: length of its record}, "tensors": {name: [..., files, keys, starts]}}
    {"size": ...}{"size": ...}{"size": ...}

Nothing in it is checked: a rank of the job has made it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import accumulate, pairwise
from operator import sub
from typing import Any

from shardwell.checkpoint.files import FileRecord
from shardwell.checkpoint.manifest import Manifest
from shardwell.checkpoint.manifest_text import file_text, plain, read_file
from shardwell.checkpoint.parsing import CODES, DTYPES
from shardwell.checkpoint.pieces import BoxPiece, FilePiece, FlatPieces, TensorRecord
from shardwell.sharding.layout import product


def index_of(manifest: Manifest) -> str:
    """Return the index of a manifest that was checked."""
    records = [file_text(record) for record in manifest.files.values()]
    numbers = {name: number for number, name in enumerate(manifest.files)}
    tensors = {
        name: (CODES[one.dtype], one.shape, one.stride, one.kind, *_columns(one, numbers))
        for name, one in manifest.tensors.items()
    }
    lengths = dict(zip(manifest.files, map(len, records), strict=True))
    first = {"values": plain(manifest.values), "files": lengths, "tensors": tensors}
    return json.dumps(first, separators=(",", ":")) + "\n" + "".join(records)


def manifest_of(index: str) -> Manifest:
    """Return the manifest of an index."""
    first, _, records = index.partition("\n")
    content = json.loads(first)
    files = list(content["files"])
    tensors: dict[str, TensorRecord] = {}
    pieces: Sequence[FilePiece]
    for name, (dtype, shape, stride, kind, *columns) in content["tensors"].items():
        pieces = _box_pieces(columns[0]) if len(columns) == 1 else _flat_pieces(columns, product(shape), files)
        tensors[name] = TensorRecord(DTYPES[dtype], tuple(shape), tuple(stride), kind, pieces)
    return Manifest(tensors, _Files(content["files"], records), content["values"])


def _columns(record: TensorRecord, numbers: Mapping[str, int]) -> Sequence[Any]:
    """Return the columns of flat pieces (files, keys, starts; one key if all have the same), or the rows of others."""
    if record.is_boxed:
        return ([astuple(piece) for piece in record.pieces],)
    pieces = FlatPieces.of(record.pieces)
    keys = pieces.keys[0] if len(set(pieces.keys)) == 1 else pieces.keys
    return [numbers[file] for file in pieces.files], keys, pieces.starts


def _flat_pieces(columns: Sequence[Any], numel: int, files: Sequence[str]) -> FlatPieces:
    numbers, keys, starts = columns
    numels = list(map(sub, [*starts[1:], numel], starts))  # they tile the tensor
    every = [keys] * len(starts) if isinstance(keys, str) else keys
    return FlatPieces([files[number] for number in numbers], every, starts, numels)


def _box_pieces(rows: Sequence[Any]) -> tuple[BoxPiece, ...]:
    return tuple(
        BoxPiece(file, key, start, numel, tuple(offsets), tuple(sizes))
        for file, key, start, numel, offsets, sizes in rows
    )


class _Files(Mapping[str, FileRecord]):
    """Records of files, each read when it is asked for."""

    def __init__(self, lengths: Mapping[str, int], records: str) -> None:
        ends = pairwise(accumulate(lengths.values(), initial=0))
        self._places, self._records = dict(zip(lengths, ends, strict=True)), records

    def __getitem__(self, name: str) -> FileRecord:
        begin, end = self._places[name]
        return read_file(json.loads(self._records[begin:end]), name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
