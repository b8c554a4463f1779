"""Reads files of `torch.save` without running code that they name.

A pickle names the classes and functions that make its objects. Dense tensors need a few of torch's own. Classes of
other libraries are never imported: their objects become a `Stub`, which holds their content and does nothing. A file
that names anything else is refused before it is unpickled.
"""

from __future__ import annotations

import contextlib
import math
import pickletools
import threading
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwell.checkpoint.manifest import MAX_DEPTH
from shardwell.checkpoint.parsing import CODES, MAX_BITS
from shardwell.checkpoint.sources.mapped import number_in
from shardwell.checkpoint.sources.opcodes import check_value, examine
from shardwell.errors import CheckpointError

STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
PLAIN = frozenset(
    {
        "collections.OrderedDict",
        "torch.Size",
        "torch.Tensor",
        "torch._tensor._rebuild_from_type_v2",  # of tensors with attributes
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor_v2",
        *(f"torch.{kind}Storage" for kind in STORAGES),
        *map(str, CODES),
    }
)
PROTOCOL = 2
_MOST_PICKLE = 2**28  # bytes
MAX_NODES = 1_000_000  # of a value that becomes JSON

_allowing = threading.Lock()  # torch.load has one set of allowed names for all threads


class Stub:
    """The content of an object whose class is not imported: its constructor's arguments, and its state."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Stub:
        stub = super().__new__(cls)
        stub.arguments, stub.state = arguments, None
        return stub

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load(path: Path, stubs: Iterable[str] = ()) -> Any:
    """Return the value in a file. Its tensors are memory-mapped: bytes are read when they are used.

    `stubs` are the full names of classes whose objects become a `Stub`.
    """
    names = set(stubs)
    data = _pickle_in(path)
    unknown = sorted(_names_in(data, path) - PLAIN - names)
    if unknown:
        raise CheckpointError(
            f"{path}: refers to {', '.join(unknown[:10])}; only tensors and plain values are read. "
            "Name it in `ignore` to leave such objects out"
        )
    is_late = examine(data, str(path))
    with _allowing, torch.serialization.safe_globals([(Stub, name) for name in names]):
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a pickle that is wrong can fail in any way
            reason = str(error).partition("\n")[0][:200]
            raise CheckpointError(f"{path}: damaged, or no file of torch.save ({reason})") from error
    if is_late:
        check_value(found, len(data), str(path), _held)
    return found


def _held(value: Any) -> Any:
    return (value.arguments, value.state) if isinstance(value, Stub) else None


def _names_in(data: bytes, path: Path) -> set[str]:
    """Return the full names of all classes and functions that a file refers to, without unpickling it."""
    names: set[str] = set()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "PROTO" and argument != PROTOCOL:
                raise CheckpointError(f"{path}: a pickle of protocol {argument}; torch.save writes protocol {PROTOCOL}")
            if opcode.name == "GLOBAL":  # torch.load knows no other operation that names a class
                names.add(str(argument).replace(" ", "."))
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged ({error})") from error
    return names


def _pickle_in(path: Path) -> bytes:
    """Return the one pickle in a file."""
    if not path.is_file():
        raise CheckpointError(f"{path}: missing, or not a regular file")
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            pickles = [record for record in records if record.filename.endswith("/data.pkl")]
            if len(pickles) == 1 and all(record.compress_type == zipfile.ZIP_STORED for record in records):
                if pickles[0].file_size > _MOST_PICKLE:
                    raise ValueError(f"a pickle of {pickles[0].file_size} bytes; expected at most {_MOST_PICKLE}")
                found = archive.read(pickles[0])
                if torch._C.PyTorchFileReader(str(path)).get_record("data.pkl") != found:  # it ignores case, for one
                    raise ValueError("it has a second pickle, which torch would read")
                return found
    except Exception as error:  # an archive that is wrong can fail in any way
        raise CheckpointError(f"{path}: truncated, damaged, or no file of torch.save ({error})") from error
    raise CheckpointError(f"{path}: expected one pickle and no compression, as torch.save writes them")


# --- values that are no tensors ---------------------------------------------------------------------------------


def number(value: Any) -> bool | int | float | None:
    """Return a finite number, also from a tensor without dimensions; None for anything else."""
    if isinstance(value, Tensor) and value.dim() == 0:
        value = number_in(value)
    if isinstance(value, int) and value.bit_length() <= MAX_BITS:
        return value
    return value if isinstance(value, float) and math.isfinite(value) else None


def json_entries(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the entries of a dictionary that JSON can hold, with lists for tuples, without the others."""
    left = [MAX_NODES]  # a small pickle can hold one list in many places
    found: dict[str, Any] = {}
    for key, value in content.items():
        with contextlib.suppress(_NotJsonError):
            found |= _as_json({key: value}, MAX_DEPTH, left)
    return found


class _NotJsonError(Exception):
    """Raised for a value that JSON cannot hold."""


def _as_json(value: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if not depth or left[0] < 0:
        raise _NotJsonError
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _as_json(item, depth - 1, left) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item, depth - 1, left) for item in value]
    if value is None or isinstance(value, str):
        return value
    if number(value) is None:
        raise _NotJsonError
    return number(value)
