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

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from shardwell.checkpoint.checksums import ALGORITHM, CHECKSUM, CHECKSUMS, DIGITS, HEX
from shardwell.checkpoint.files import FileRecord
from shardwell.checkpoint.manifest_text import (
    canonical,
    checksum_of,
    ends_with_checksum,
    expect_fields,
    expect_object,
    read_file,
    read_tensor,
    text_of,
)
from shardwell.checkpoint.parsing import (
    CODES,
    LIMIT,
    MAX_BITS,
    failing,
    is_size,
    open_plain,
    parse_json,
    parse_shape,
    show,
    without_collections,
)
from shardwell.checkpoint.pieces import FilePiece, FlatPieces, TensorRecord, check_size, check_tiling
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
        text = text_of(self.tensors, self.files, self.values, self.version)
        text = f'{text[:-1]},"checksum":"{checksum_of(text)}"}}'
        if len(text) > MAX_BYTES:
            raise CheckpointError(f"{where}: {len(text)} bytes; expected at most {MAX_BYTES}; save less in values")
        return text

    @staticmethod
    def from_json(text: str | bytes, where: str = NAME, *, part: bool = False) -> Manifest:
        """Return the manifest in a text, which messages call `where`. A part need not tile its tensors."""
        if len(text) > MAX_BYTES:
            raise CheckpointError(f"{where}: {len(text)} bytes; expected at most {MAX_BYTES}")
        with without_collections(len(text)):
            content = parse_json(text, where)
            manifest = _read(content, where)
        version = content["version"]
        if manifest.version != version:
            boxes = "with" if manifest.version == BOX_VERSION else "without"
            raise CheckpointError(
                f"{where}: version: expected {manifest.version} for a manifest {boxes} boxes, found {version}"
            )
        manifest.check(where, part=part)
        expected = content.pop("checksum")
        if not ends_with_checksum(text, expected) and checksum_of(canonical(content)) != expected:
            raise CheckpointError(f"{where}: checksum: the manifest was damaged or changed after it was written")
        return manifest

    def check(self, where: str = NAME, *, part: bool = False) -> None:
        """Raise unless the manifest is valid. One that was found valid is not checked again."""
        if self._is_valid or (part and self._is_valid_part):
            return
        for name, record in self.files.items():
            _check_file(name, record, f"{where}: files[{show(name)}]")
        rest = {name: record.size for name, record in self.files.items()}  # bytes that no piece has claimed yet
        free = {*chain.from_iterable(zip(repeat(name), file.checksums) for name, file in self.files.items())}
        for name, tensor in self.tensors.items():
            entry = f"{where}: tensors[{show(name)}]"
            _check_text(name, entry)
            _check_tensor(tensor, entry)
            check_tiling(tensor, entry, part)
            if not _claim_places(tensor.pieces, free):
                for index, piece in enumerate(tensor.pieces):
                    _check_place(piece, self.files, free, entry, index)
            pieces = FlatPieces.of(tensor.pieces)
            for index, (file, numel) in enumerate(zip(pieces.files, pieces.numels, strict=True)):
                rest[file] -= numel * tensor.dtype.itemsize
                if rest[file] < 0:
                    raise CheckpointError(
                        f"{entry}.pieces[{index}]: more bytes than {file} has ({self.files[file].size})"
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


def _read(content: Any, where: str) -> Manifest:
    """Return the manifest of a parsed text, of which only the form was checked."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{where}: expected a JSON object at the top, found {show(content)}")
    version = content.get("version")
    if type(version) is not int or version not in (VERSION, BOX_VERSION):
        raise CheckpointError(
            f"{where}: version: expected {VERSION} or {BOX_VERSION}, found {show(version)}; "
            "it was written by another version of shardwell, or is no manifest"
        )
    fields = expect_fields(content, ("version", "tensors", "files", "values", "checksum"), where)
    tensors = {
        name: read_tensor(raw, f"{where}: tensors[{show(name)}]")
        for name, raw in expect_object(fields["tensors"], f"{where}: tensors").items()
    }
    files = {
        name: read_file(raw, f"{where}: files[{show(name)}]")
        for name, raw in expect_object(fields["files"], f"{where}: files").items()
    }
    return Manifest(tensors, files, expect_object(fields["values"], f"{where}: values"))


# --- checking ---------------------------------------------------------------------------------------------------


def _check_file(name: Any, record: FileRecord, where: str) -> None:
    if not plain_name(name) or name == NAME:
        raise CheckpointError(f"{where}: expected the plain name of a data file, without directories")
    if record.algorithm != ALGORITHM:
        raise CheckpointError(f"{where}.algorithm: expected {show(ALGORITHM)}, found {show(record.algorithm)}")
    check_size(record.size, f"{where}.size")
    _check_checksum(record.header, f"{where}.header")
    for key, checksum in () if _are_checksums(record.checksums) else record.checksums.items():
        if not is_text(key) or not is_text(checksum) or not CHECKSUM.fullmatch(checksum):
            _check_text(key, f"{where}.checksums")
            _check_checksum(checksum, f"{where}.checksums[{show(key)}]")
    check_size(record.block, f"{where}.block")
    if record.blocks and not record.block:
        raise CheckpointError(f"{where}.block: expected the bytes of a block, found 0")
    for key, sums in record.blocks.items():
        if key not in record.checksums or not is_text(sums) or not CHECKSUMS.fullmatch(sums):
            raise CheckpointError(f"{where}.blocks[{show(key)}]: expected checksums of a tensor's blocks")


def _are_checksums(sums: Mapping[str, str]) -> bool:
    """Tell whether all keys are texts and all values are checksums; looks at all of them at once."""
    if set(map(type, chain(sums, sums.values()))) - {str} or set(map(len, sums.values())) - {DIGITS}:
        return False
    return HEX.fullmatch("".join(sums.values())) is not None


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


def _claim_places(pieces: Sequence[FilePiece], free: set[tuple[str, str]]) -> bool:
    """Take the places of pieces from those that are free, all at once; return False if one of them is not."""
    if not isinstance(pieces, FlatPieces) or not pieces.is_plain:
        return False
    places = set(zip(pieces.files, pieces.keys, strict=True))
    if len(places) < len(pieces) or not places <= free:
        return False
    free -= places
    return True


def _check_place(
    piece: FilePiece, files: Mapping[str, FileRecord], free: set[tuple[str, str]], where: str, index: int
) -> None:
    if not is_text(piece.file) or piece.file not in files:
        raise CheckpointError(f"{where}.pieces[{index}].file: {show(piece.file)} is not among the files")
    if not is_text(piece.key) or piece.key not in files[piece.file].checksums:
        raise CheckpointError(f"{where}.pieces[{index}].key: {show(piece.key)} is not in {piece.file}")
    place = (piece.file, piece.key)
    if place not in free:
        raise CheckpointError(f"{where}.pieces[{index}].key: {show(piece.key)} in {piece.file} is claimed twice")
    free.remove(place)


def _check_has_blocks(record: TensorRecord, files: Mapping[str, FileRecord], where: str) -> None:
    """Raise if a file that holds pieces of boxes lacks checksums of blocks, which all writers of boxes know."""
    for index, piece in enumerate(record.pieces):
        if not files[piece.file].block:
            raise CheckpointError(f"{where}.pieces[{index}]: {piece.file} has no checksums of blocks")


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
