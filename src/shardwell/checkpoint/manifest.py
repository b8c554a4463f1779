"""The manifest of a checkpoint: in which file each element of each tensor is, and the other values that were saved.

This module has pure values and functions. A manifest names tensors and files, never ranks: any number of ranks can read
a checkpoint that any other number wrote, each only the ranges that it needs.

    tensor w, 12 elements   | piece 0 (5)         | piece 1 (7)                 |
    in files                rank0: key "w"        rank1: key "w"

A manifest has version 1, and version 2 if a tensor is in pieces of boxes, which readers of version 1 do not know.

The content of a manifest is not trusted: file names must be plain names, pieces must tile their tensor, and no tensor
may have more bytes than the files that hold it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwell.checkpoint.checksums import ALGORITHM, CHECKSUM, CHECKSUMS
from shardwell.checkpoint.files import FileRecord
from shardwell.checkpoint.parsing import (
    CODES,
    LIMIT,
    MAX_BITS,
    failing,
    is_size,
    open_plain,
    parse_dtype,
    parse_json,
    parse_shape,
    show,
)
from shardwell.checkpoint.pieces import BoxPiece, FilePiece, TensorRecord, check_size, check_tiling, merge_boxes
from shardwell.errors import CheckpointError
from shardwell.sharding.layout import dense_stride

VERSION = 1
BOX_VERSION = 2  # with pieces of boxes
NAME = "manifest.json"
MAX_BYTES = 2**30  # of a manifest
MAX_DEPTH = 64  # of objects and lists inside `values`
MAX_NAME = 200  # bytes of a file name: the limit of file systems, less the length that temporary names add


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint; or, while ranks write it, those of one rank."""

    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)  # JSON: counters, configuration, versions and the like
    _is_valid: bool = field(default=False, init=False, repr=False, compare=False)
    _is_valid_part: bool = field(default=False, init=False, repr=False, compare=False)

    @property
    def version(self) -> int:
        """The version of the format that can express this manifest."""
        return BOX_VERSION if any(record.is_boxed for record in self.tensors.values()) else VERSION

    def to_json(self, where: str = NAME, *, part: bool = False) -> str:
        """Return ASCII text that `from_json` accepts; raise if the manifest is invalid."""
        self.check(where, part=part)
        return self.text(where)

    def text(self, where: str = NAME) -> str:
        """Return the text of `to_json` for a manifest that was checked already."""
        text = _canonical(_content(self))
        text = f'{text[:-1]},"checksum":"{_checksum(text)}"}}'
        if len(text) > MAX_BYTES:
            raise CheckpointError(f"{where}: {len(text)} bytes; expected at most {MAX_BYTES}; save less in values")
        return text

    @staticmethod
    def from_json(text: str | bytes, where: str = NAME, *, part: bool = False, is_checked: bool = False) -> Manifest:
        """Return the manifest in a text, which messages call `where`. A part need not tile its tensors.

        With `is_checked`, another rank of the job has made the text of a manifest that it has checked.
        """
        if len(text) > MAX_BYTES:
            raise CheckpointError(f"{where}: {len(text)} bytes; expected at most {MAX_BYTES}")
        content = parse_json(text, where)
        if not isinstance(content, dict):
            raise CheckpointError(f"{where}: expected a JSON object at the top, found {show(content)}")
        version = content.get("version")
        if type(version) is not int or version not in (VERSION, BOX_VERSION):
            raise CheckpointError(
                f"{where}: version: expected {VERSION} or {BOX_VERSION}, found {show(version)}; "
                "it was written by another version of shardwell, or is no manifest"
            )
        fields = _fields(content, ("version", "tensors", "files", "values", "checksum"), where)
        tensors = {
            name: _read_tensor(raw, f"{where}: tensors[{show(name)}]")
            for name, raw in _object(fields["tensors"], f"{where}: tensors").items()
        }
        files = {
            name: _read_file(raw, f"{where}: files[{show(name)}]")
            for name, raw in _object(fields["files"], f"{where}: files").items()
        }
        manifest = Manifest(tensors, files, _object(fields["values"], f"{where}: values"))
        if is_checked:
            object.__setattr__(manifest, "_is_valid", True)
            return manifest
        if manifest.version != version:
            boxes = "with" if manifest.version == BOX_VERSION else "without"
            raise CheckpointError(
                f"{where}: version: expected {manifest.version} for a manifest {boxes} boxes, found {version}"
            )
        manifest.check(where, part=part)
        expected = content.pop("checksum")
        if not _ends_with_checksum(text, expected) and _checksum(_canonical(content)) != expected:
            raise CheckpointError(f"{where}: checksum: the manifest was damaged or changed after it was written")
        return manifest

    @staticmethod
    def merge(parts: Iterable[Manifest], where: str = NAME) -> Manifest:
        """Merge the manifests of all ranks. Values that several of them have must agree, and the pieces must tile."""
        tensors: dict[str, TensorRecord] = {}
        pieces: dict[str, list[FilePiece]] = {}
        boxed: defaultdict[str, list[TensorRecord]] = defaultdict(list)  # the records of ranks that hold boxes
        files: dict[str, FileRecord] = {}
        values: dict[str, Any] = {}
        for part in parts:
            part.check(where, part=True)
            for name, record in part.files.items():
                if name in files:
                    raise CheckpointError(f"{where}: files[{show(name)}]: written by two ranks; use different names")
                files[name] = record
            for name, tensor in part.tensors.items():
                _check_same(tensors.setdefault(name, tensor), tensor, f"{where}: tensors[{show(name)}]")
                pieces.setdefault(name, []).extend(tensor.pieces)
                if tensor.is_boxed:
                    boxed[name].append(tensor)
            for key, value in part.values.items():
                if values.setdefault(key, value) is not value and _canonical(values[key]) != _canonical(value):
                    raise CheckpointError(f"{where}: values.{key}: ranks disagree; save it under a key of its own")
        whole = Manifest(
            {
                name: merge_boxes(boxed[name], pieces[name], f"{where}: tensors[{show(name)}]")
                if name in boxed
                else replace(first, pieces=tuple(sorted(pieces[name], key=lambda piece: piece.start)))
                for name, first in tensors.items()
            },
            files,
            values,
        )
        whole.check(where)
        return whole

    def check(self, where: str = NAME, *, part: bool = False) -> None:
        """Raise unless the manifest is valid. One that was found valid is not checked again."""
        if self._is_valid or (part and self._is_valid_part):
            return
        for name, record in self.files.items():
            _check_file(name, record, f"{where}: files[{show(name)}]")
        rest = {name: record.size for name, record in self.files.items()}  # bytes that no piece has claimed yet
        used: set[tuple[str, str]] = set()
        for name, tensor in self.tensors.items():
            entry = f"{where}: tensors[{show(name)}]"
            _check_text(name, entry)
            _check_tensor(tensor, entry)
            check_tiling(tensor, entry, part)
            for index, piece in enumerate(tensor.pieces):
                _check_place(piece, self.files, used, entry, index)
                rest[piece.file] -= piece.numel * tensor.dtype.itemsize
                if rest[piece.file] < 0:
                    raise CheckpointError(
                        f"{entry}.pieces[{index}]: more bytes than {piece.file} has ({self.files[piece.file].size})"
                    )
            if tensor.is_boxed:
                _check_has_blocks(tensor, self.files, entry)
        _check_json(self.values, f"{where}: values", MAX_DEPTH)
        object.__setattr__(self, "_is_valid_part" if part else "_is_valid", True)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in a checkpoint's directory. Its files are not looked at."""
    where = path / NAME
    file, size = open_plain(where)
    with file:
        if size > MAX_BYTES:
            raise CheckpointError(f"{where}: {size} bytes; expected at most {MAX_BYTES}")
        with failing(f"{where}: cannot be read"):
            text = file.readall()
    return Manifest.from_json(text, str(where))


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def plain_name(name: Any) -> bool:
    """Tell whether a name can only mean a visible entry of the directory in which it is looked up."""
    if not isinstance(name, str) or not name or name.startswith(".") or name != name.strip() or not name.isprintable():
        return False
    return not any(sign in name for sign in "/\\\0") and len(name.encode("utf-8", "replace")) <= MAX_NAME


# --- checking ---------------------------------------------------------------------------------------------------


def _check_file(name: Any, record: FileRecord, where: str) -> None:
    if not plain_name(name) or name == NAME:
        raise CheckpointError(f"{where}: expected the plain name of a data file, without directories")
    if record.algorithm != ALGORITHM:
        raise CheckpointError(f"{where}.algorithm: expected {show(ALGORITHM)}, found {show(record.algorithm)}")
    check_size(record.size, f"{where}.size")
    _check_checksum(record.header, f"{where}.header")
    for key, checksum in record.checksums.items():
        if not is_text(key) or not is_text(checksum) or not CHECKSUM.fullmatch(checksum):
            _check_text(key, f"{where}.checksums")
            _check_checksum(checksum, f"{where}.checksums[{show(key)}]")
    check_size(record.block, f"{where}.block")
    if record.blocks and not record.block:
        raise CheckpointError(f"{where}.block: expected the bytes of a block, found 0")
    for key, sums in record.blocks.items():
        if key not in record.checksums or not is_text(sums) or not CHECKSUMS.fullmatch(sums):
            raise CheckpointError(f"{where}.blocks[{show(key)}]: expected checksums of a tensor's blocks")


def _check_tensor(record: TensorRecord, where: str) -> None:
    if record.dtype not in CODES:
        raise CheckpointError(f"{where}.dtype: {record.dtype} cannot be stored")
    parse_shape(list(record.shape), where)
    if record.numel * record.dtype.itemsize >= LIMIT:
        raise CheckpointError(f"{where}.shape: {show(record.shape)} of {record.dtype} is more than 2**63 bytes")
    if len(record.stride) != len(record.shape) or not all(is_size(step) for step in record.stride):
        raise CheckpointError(f"{where}.stride: expected {len(record.shape)} sizes, found {show(record.stride)}")
    if record.numel and dense_stride(record.shape, record.stride) != tuple(record.stride):
        raise CheckpointError(
            f"{where}.stride: {show(record.stride)} does not fill memory in any order of {show(record.shape)}"
        )
    _check_text(record.kind, f"{where}.kind")
    if not record.kind:
        raise CheckpointError(f'{where}.kind: expected a word such as "parameter"')


def _check_place(
    piece: FilePiece, files: Mapping[str, FileRecord], used: set[tuple[str, str]], where: str, index: int
) -> None:
    if not is_text(piece.file) or piece.file not in files:
        raise CheckpointError(f"{where}.pieces[{index}].file: {show(piece.file)} is not among the files")
    if not is_text(piece.key) or piece.key not in files[piece.file].checksums:
        raise CheckpointError(f"{where}.pieces[{index}].key: {show(piece.key)} is not in {piece.file}")
    place = (piece.file, piece.key)
    if place in used:
        raise CheckpointError(f"{where}.pieces[{index}].key: {show(piece.key)} in {piece.file} is claimed twice")
    used.add(place)


def _check_has_blocks(record: TensorRecord, files: Mapping[str, FileRecord], where: str) -> None:
    """Raise if a file that holds pieces of boxes lacks checksums of blocks, which all writers of boxes know."""
    for index, piece in enumerate(record.pieces):
        if not files[piece.file].block:
            raise CheckpointError(f"{where}.pieces[{index}]: {piece.file} has no checksums of blocks")


def _check_same(first: TensorRecord, other: TensorRecord, where: str) -> None:
    for name in ("dtype", "shape", "kind") if other.is_boxed else ("dtype", "shape", "stride", "kind"):
        one, two = getattr(first, name), getattr(other, name)
        if one != two:
            raise CheckpointError(f"{where}.{name}: ranks disagree: {one} and {two}")


def _check_json(value: Any, where: str, depth: int) -> None:
    """Raise unless `value` survives a round trip through JSON."""
    inner: Iterator[tuple[str, Any]]
    if isinstance(value, Mapping):
        for key in value:
            _check_text(key, f"{where}: a key")
        inner = ((f"{where}.{key}", item) for key, item in value.items())
    elif isinstance(value, list):
        if all(type(item) is int and -LIMIT < item < LIMIT for item in value):  # such as the state of a generator
            value = []
        inner = ((f"{where}[{index}]", item) for index, item in enumerate(value))
    else:
        _check_scalar(value, where)
        return
    if not depth:
        raise CheckpointError(f"{where[:200]}: nested too deeply; expected at most {MAX_DEPTH} levels")
    for path, item in inner:
        _check_json(item, path, depth - 1)


def _check_scalar(value: Any, where: str) -> None:
    if value is None or isinstance(value, (bool, str)):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{where}: {value} is not a number in JSON; expected a finite number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise CheckpointError(f"{where}: expected a number of at most {MAX_BITS} bits, found {value.bit_length()}")
    if not isinstance(value, (int, float)):
        raise CheckpointError(f"{where}: expected a JSON value, found {type(value).__name__}")


def _check_text(value: Any, where: str) -> None:
    if not is_text(value):
        raise CheckpointError(f"{where}: expected a string, found {show(value)}")


def _check_checksum(value: Any, where: str) -> None:
    if not is_text(value) or not CHECKSUM.fullmatch(value):
        raise CheckpointError(f"{where}: expected a checksum of 8 hexadecimal digits, found {show(value)}")


# --- to and from JSON -------------------------------------------------------------------------------------------


def _content(manifest: Manifest) -> dict[str, Any]:
    return {
        "version": manifest.version,
        "tensors": {
            name: {
                "dtype": CODES[record.dtype],
                "shape": record.shape,
                "stride": record.stride,
                "kind": record.kind,
                "pieces": _content_of_pieces(record),
            }
            for name, record in manifest.tensors.items()
        },
        "files": {
            name: {
                "size": record.size,
                "algorithm": record.algorithm,
                "header": record.header,
                "checksums": dict(record.checksums),
                **({"block": record.block, "blocks": dict(record.blocks)} if record.block else {}),
            }
            for name, record in manifest.files.items()
        },
        "values": _plain(manifest.values),
    }


def _content_of_pieces(record: TensorRecord) -> list[tuple[Any, ...]]:
    if record.is_boxed:
        return [astuple(piece) for piece in record.pieces]
    return [(piece.file, piece.key, piece.start, piece.numel) for piece in record.pieces]


def _plain(value: Any) -> Any:
    """Return a value with dictionaries in place of other mappings, for the encoder."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode('ascii')):08x}"


def _ends_with_checksum(text: str | bytes, checksum: Any) -> bool:
    """Tell whether a text is one that `Manifest.text` made with this checksum; one that was formatted anew is not."""
    text = text.encode("utf-8", "replace") if isinstance(text, str) else text
    end = f',"checksum":"{checksum}"}}'.encode("utf-8", "replace")
    if not text.endswith(end):
        return False
    found = zlib.crc32(b"}", zlib.crc32(memoryview(text)[: -len(end)]))
    return f"{found:08x}" == str(checksum)


def _read_tensor(raw: Any, where: str) -> TensorRecord:
    fields = _fields(raw, ("dtype", "shape", "stride", "kind", "pieces"), where)
    found = _list(fields["pieces"], f"{where}.pieces")
    is_boxed = bool(found) and isinstance(found[0], list) and len(found[0]) == 6
    length = 6 if is_boxed else 4
    pieces: list[FilePiece] = []
    for index, piece in enumerate(found):
        if not isinstance(piece, list) or len(piece) != length:
            raise CheckpointError(f"{where}.pieces[{index}]: expected a list of {length}, found {show(piece)}")
        pieces.append(_read_box_piece(piece, f"{where}.pieces[{index}]") if is_boxed else FilePiece(*piece))
    return TensorRecord(
        parse_dtype(fields["dtype"], where),
        parse_shape(fields["shape"], where),
        tuple(_list(fields["stride"], f"{where}.stride")),
        fields["kind"],
        tuple(pieces),
    )


def _read_box_piece(raw: list[Any], where: str) -> BoxPiece:
    file, key, start, numel, offsets, sizes = raw
    corner, lengths = tuple(_list(offsets, f"{where}.offsets")), tuple(_list(sizes, f"{where}.sizes"))
    return BoxPiece(file, key, start, numel, corner, lengths)


def _read_file(raw: Any, where: str) -> FileRecord:
    fields = _fields(raw, ("size", "algorithm", "header", "checksums"), where, ("block", "blocks"))
    checksums = _object(fields["checksums"], f"{where}.checksums")
    blocks = _object(fields.get("blocks", {}), f"{where}.blocks")
    return FileRecord(fields["size"], fields["header"], checksums, fields["algorithm"], blocks, fields.get("block", 0))


def _object(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise CheckpointError(f"{where}: expected an object, found {show(raw)}")
    return raw


def _list(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise CheckpointError(f"{where}: expected a list, found {show(raw)}")
    return raw


def _fields(raw: Any, names: tuple[str, ...], where: str, others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return an object that has all of `names`, and possibly `others`."""
    content = _object(raw, where)
    for name in names:
        if name not in content:
            raise CheckpointError(f"{where}: {name}: missing")
    for name in content:
        if name not in names and name not in others:
            raise CheckpointError(f"{where}: {show(name)}: unknown field")
    return content
