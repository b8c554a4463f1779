"""Merging: from the parts of all ranks to the manifest of a checkpoint.

Rank 0 merges while others wait for the commit, so this is cheap for thousands of parts. Each rank has checked its own;
what is read of one are the columns of its pieces, and the whole is checked once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardwell.checkpoint.files import FileRecord
from shardwell.checkpoint.manifest import NAME, Manifest
from shardwell.checkpoint.manifest_text import (
    canonical,
    ends_with_checksum,
    expect_fields,
    expect_object,
    plain,
    read_file,
    read_tensor,
)
from shardwell.checkpoint.parsing import parse_json, show
from shardwell.checkpoint.pieces import FilePiece, FlatPieces, TensorRecord, merge_boxes
from shardwell.errors import CheckpointError


def merge(parts: Iterable[Manifest], where: str = NAME) -> Manifest:
    """Merge the manifests of all ranks. Values that several of them have must agree, and the pieces must tile."""
    merger = Merger(where)
    for part in parts:
        merger.add(part)
    return merger.finish()


class Merger:
    """Takes one part after the other."""

    def __init__(self, where: str = NAME) -> None:
        self._where = where
        self._tensors: dict[str, _Merged] = {}
        self._files: dict[str, FileRecord] = {}
        self._values: dict[str, tuple[Any, str]] = {}  # each with its text
        self._names: dict[str, str] = {}

    def add(self, part: Manifest) -> None:
        """Add the part of this rank."""
        part.check(self._where, part=True)
        for name, file in part.files.items():
            self._add_file(name, file)
        for name, tensor in part.tensors.items():
            self._add_tensor(name, tensor)
        self._add_values(part.values)

    def add_text(self, text: str, where: str) -> None:
        """Add the part of a rank that has checked it and then made this text of it, which messages call `where`."""
        content = parse_json(text, where)
        fields = expect_fields(content, ("version", "tensors", "files", "values", "checksum"), where)
        if not ends_with_checksum(text, fields["checksum"]):
            raise CheckpointError(f"{where}: checksum: a rank's part was damaged or changed after it was written")
        for name, file in expect_object(fields["files"], f"{where}: files").items():
            self._add_file(name, read_file(file, f"{where}: files[{show(name)}]"))
        try:
            for name, raw in fields["tensors"].items():
                self._add_raw(name, raw, where)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{where}: tensors: not what a rank writes ({error})") from error
        self._add_values(expect_object(fields["values"], f"{where}: values"))

    def finish(self) -> Manifest:
        """Return the manifest, which was checked."""
        tensors = {
            name: merged.whole(f"{self._where}: tensors[{show(name)}]") for name, merged in self._tensors.items()
        }
        whole = Manifest(tensors, self._files, {key: value for key, (value, _) in self._values.items()})
        whole.check(self._where)
        return whole

    def _add_file(self, name: str, record: FileRecord) -> None:
        if name in self._files:
            raise CheckpointError(f"{self._where}: files[{show(name)}]: written by two ranks; use different names")
        self._files[name] = record

    def _add_values(self, values: Any) -> None:
        for key, value in values.items():
            text = canonical(plain(value))
            if self._values.setdefault(key, (value, text))[1] != text:
                raise CheckpointError(f"{self._where}: values.{key}: ranks disagree; save it under a key of its own")

    def _add_tensor(self, name: str, tensor: TensorRecord) -> _Merged:
        known = self._tensors.get(name)
        if known is None:
            known = self._tensors[name] = _Merged(tensor)
        _check_same(known.first, tensor, f"{self._where}: tensors[{show(name)}]")
        known.add(tensor)
        return known

    def _add_raw(self, name: str, raw: dict[str, Any], where: str) -> None:
        """Add what a part says of a tensor; what is described as in a part before is not read again."""
        pieces = raw.pop("pieces")
        known = self._tensors.get(name)
        if known is not None and known.described == raw and pieces and len(pieces[0]) == 4:
            same = self._names.setdefault  # each name is one object, however many parts have it
            known.add_rows((same(file, file), same(key, key), start, numel) for file, key, start, numel in pieces)
            return
        record = read_tensor({**raw, "pieces": pieces}, f"{where}: tensors[{show(name)}]")
        self._add_tensor(name, record).described = raw


class _Merged:
    """A tensor, with the pieces of the parts so far."""

    def __init__(self, first: TensorRecord) -> None:
        self.first = first
        self.described: dict[str, Any] | None = None  # what parts say of it besides its pieces
        self._files: list[str] = []
        self._keys: list[str] = []
        self._starts: list[int] = []
        self._numels: list[int] = []
        self._boxed: list[TensorRecord] = []

    def add(self, record: TensorRecord) -> None:
        if record.is_boxed:
            self._boxed.append(record)
        else:
            self.add_rows((one.file, one.key, one.start, one.numel) for one in record.pieces)

    def add_rows(self, rows: Iterable[Any]) -> None:
        for file, key, start, numel in rows:
            self._files.append(file)
            self._keys.append(key)
            self._starts.append(start)
            self._numels.append(numel)

    def whole(self, where: str) -> TensorRecord:
        """Return the record with all pieces, in order."""
        flat = FlatPieces(self._files, self._keys, self._starts, self._numels)
        if not self._boxed:
            first = self.first
            return TensorRecord(first.dtype, first.shape, first.stride, first.kind, flat.in_order())
        pieces: list[FilePiece] = [*flat, *(piece for record in self._boxed for piece in record.pieces)]
        return merge_boxes(self._boxed, pieces, where)


def _check_same(first: TensorRecord, other: TensorRecord, where: str) -> None:
    for name in ("dtype", "shape", "kind") if other.is_boxed else ("dtype", "shape", "stride", "kind"):
        one, two = getattr(first, name), getattr(other, name)
        if one != two:
            raise CheckpointError(f"{where}.{name}: ranks disagree: {one} and {two}")
