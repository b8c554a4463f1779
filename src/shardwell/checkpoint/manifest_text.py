"""The text of a manifest: canonical JSON with a checksum, and what is read from it before it is checked.

A manifest of thousands of ranks has millions of pieces, so the text is put together from the columns of `FlatPieces`,
and is read into them. It is the text that `json.dumps` with sorted keys makes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from shardwell.checkpoint.files import FileRecord
from shardwell.checkpoint.parsing import CODES, parse_dtype, parse_shape, show
from shardwell.checkpoint.pieces import BoxPiece, FilePiece, FlatPieces, TensorRecord
from shardwell.errors import CheckpointError

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(content: Any) -> str:
    """Return the one text of a JSON value."""
    return _ENCODER.encode(content)


def checksum_of(text: str) -> str:
    """Return the checksum of a text without its checksum."""
    return f"{zlib.crc32(text.encode('ascii')):08x}"


def ends_with_checksum(text: str | bytes, checksum: Any) -> bool:
    """Tell whether a text is one that `Manifest.text` made with this checksum; one that was formatted anew is not."""
    text = text.encode("utf-8", "replace") if isinstance(text, str) else text
    end = f',"checksum":"{checksum}"}}'.encode("utf-8", "replace")
    if not text.endswith(end):
        return False
    found = zlib.crc32(b"}", zlib.crc32(memoryview(text)[: -len(end)]))
    return f"{found:08x}" == str(checksum)


# --- writing ----------------------------------------------------------------------------------------------------


def text_of(
    tensors: Mapping[str, TensorRecord], files: Mapping[str, FileRecord], values: Mapping[str, Any], version: int
) -> str:
    """Return the text of a manifest that was checked, without its checksum."""
    quoted: dict[str, str] = {}  # texts of the names of files and keys
    entries = {
        "files": _object_of({name: file_text(record) for name, record in files.items()}),
        "tensors": _object_of({name: _tensor_text(record, quoted) for name, record in tensors.items()}),
        "values": canonical(plain(values)),
        "version": canonical(version),
    }
    return _object_of(entries)


def file_text(record: FileRecord) -> str:
    """Return the text of what is known about a file."""
    blocks = {"block": record.block, "blocks": dict(record.blocks)} if record.block else {}
    sums = {"checksums": dict(record.checksums), "header": record.header}
    return canonical({"size": record.size, "algorithm": record.algorithm, **sums, **blocks})


def plain(value: Any) -> Any:
    """Return a value with dictionaries in place of other mappings, for the encoder."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def _object_of(entries: Mapping[str, str]) -> str:
    """Return the text of an object whose values are texts already."""
    return "{" + ",".join(f"{_ENCODER.encode(name)}:{entries[name]}" for name in sorted(entries)) + "}"


def _tensor_text(record: TensorRecord, quoted: dict[str, str]) -> str:
    if record.is_boxed:
        pieces = canonical([astuple(piece) for piece in record.pieces])
    else:
        pieces = f"[{','.join(_piece_texts(FlatPieces.of(record.pieces), quoted))}]"
    shape, stride = (f"[{','.join(map(str, sizes))}]" for sizes in (record.shape, record.stride))
    described = f'"dtype":"{CODES[record.dtype]}","kind":{_ENCODER.encode(record.kind)}'
    return f'{{{described},"pieces":{pieces},"shape":{shape},"stride":{stride}}}'


def _piece_texts(pieces: FlatPieces, quoted: dict[str, str]) -> list[str]:
    for name in {*pieces.files, *pieces.keys}.difference(quoted):
        quoted[name] = _ENCODER.encode(name)
    rows = zip(pieces.files, pieces.keys, pieces.starts, pieces.numels, strict=True)
    return [f"[{quoted[file]},{quoted[key]},{start:d},{numel:d}]" for file, key, start, numel in rows]


# --- reading ----------------------------------------------------------------------------------------------------


def read_tensor(raw: Any, where: str) -> TensorRecord:
    fields = expect_fields(raw, ("dtype", "shape", "stride", "kind", "pieces"), where)
    found = _list(fields["pieces"], f"{where}.pieces")
    return TensorRecord(
        parse_dtype(fields["dtype"], where),
        parse_shape(fields["shape"], where),
        tuple(_list(fields["stride"], f"{where}.stride")),
        fields["kind"],
        _read_pieces(found, f"{where}.pieces"),
    )


def _read_pieces(found: list[Any], where: str) -> Sequence[FilePiece]:
    is_boxed = bool(found) and isinstance(found[0], list) and len(found[0]) == 6
    length = 6 if is_boxed else 4
    if set(map(type, found)) - {list} or set(map(len, found)) - {length}:
        for index, piece in enumerate(found):
            if not isinstance(piece, list) or len(piece) != length:
                raise CheckpointError(f"{where}[{index}]: expected a list of {length}, found {show(piece)}")
    if is_boxed:
        return tuple(_read_box_piece(piece, f"{where}[{index}]") for index, piece in enumerate(found))
    return FlatPieces(*zip(*found, strict=True)) if found else FlatPieces()


def _read_box_piece(raw: list[Any], where: str) -> BoxPiece:
    file, key, start, numel, offsets, sizes = raw
    corner, lengths = tuple(_list(offsets, f"{where}.offsets")), tuple(_list(sizes, f"{where}.sizes"))
    return BoxPiece(file, key, start, numel, corner, lengths)


def read_file(raw: Any, where: str) -> FileRecord:
    fields = expect_fields(raw, ("size", "algorithm", "header", "checksums"), where, ("block", "blocks"))
    checksums = expect_object(fields["checksums"], f"{where}.checksums")
    blocks = expect_object(fields.get("blocks", {}), f"{where}.blocks")
    return FileRecord(fields["size"], fields["header"], checksums, fields["algorithm"], blocks, fields.get("block", 0))


def expect_object(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise CheckpointError(f"{where}: expected an object, found {show(raw)}")
    return raw


def _list(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise CheckpointError(f"{where}: expected a list, found {show(raw)}")
    return raw


def expect_fields(raw: Any, names: tuple[str, ...], where: str, others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return an object that has all of `names`, and possibly `others`."""
    content = expect_object(raw, where)
    for name in names:
        if name not in content:
            raise CheckpointError(f"{where}: {name}: missing")
    for name in content:
        if name not in names and name not in others:
            raise CheckpointError(f"{where}: {show(name)}: unknown field")
    return content
