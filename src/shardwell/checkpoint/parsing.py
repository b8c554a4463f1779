"""Checks of file contents before they are used: regular files, strict JSON, sizes and shapes within limits."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from shardwell.errors import CheckpointError
from shardwell.sharding.layout import product

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}
CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
LIMIT = 2**63  # sizes in bytes and elements stay below this
MAX_DIMS = 64  # torch's limit
LONG_TEXT = 2**20  # bytes of JSON, from which on the garbage collector pauses: 7 times as fast with 48 MiB
MAX_DIGITS, MAX_BITS = 1000, 3300  # of a whole number in JSON; that many bits have fewer digits


def open_plain(path: Path) -> tuple[FileIO, int]:
    """Open a regular file for reading; return it and its size. Links are not followed, pipes are not waited for."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    if path.is_symlink():
        raise CheckpointError(f"{path}: a symbolic link; expected a file")
    with failing(f"{path}: cannot be read"):
        descriptor = os.open(path, flags)
        status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: not a regular file")
    return open(descriptor, "rb", buffering=0), status.st_size


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse JSON that has no repeated keys, and no numbers that are not finite or extremely long."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            twice = Counter(key for key, _ in items).most_common(1)[0][0]
            raise CheckpointError(f"{where}: {show(twice)}: written twice in the same object")
        return found

    def integer(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise CheckpointError(f"{where}: a number of {len(digits)} digits")
        return int(digits)

    def real(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else refuse(digits)

    def refuse(constant: str) -> Any:
        raise CheckpointError(f"{where}: {constant[:100]} is not a finite number")

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        whole = integer if _may_have_long_number(text) else None
        with without_collections(len(text)):
            return json.loads(text, object_pairs_hook=pairs, parse_int=whole, parse_float=real, parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not text in UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{where}: not valid JSON, line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply") from None


@contextlib.contextmanager
def without_collections(num_bytes: int) -> Iterator[None]:
    """Keep the garbage collector from looking, again and again, at the lists of a long text while they are made."""
    pauses = num_bytes >= LONG_TEXT and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()


def _may_have_long_number(text: str) -> bool:
    """Tell whether a text may have more than `MAX_DIGITS` digits in a row; if so, they fill one of these parts."""
    half = MAX_DIGITS // 2
    return any(text[start : start + half].isdigit() for start in range(0, len(text), half))


def parse_dtype(code: Any, where: str) -> torch.dtype:
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(f"{where}: dtype: expected one of {', '.join(DTYPES)}, found {show(code)}")
    return DTYPES[code]


def parse_shape(shape: Any, where: str) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(is_size(size) for size in shape):
        raise CheckpointError(f"{where}: shape: expected a list of at most {MAX_DIMS} sizes, found {show(shape)}")
    if product([max(size, 1) for size in shape]) >= LIMIT:
        raise CheckpointError(f"{where}: shape: {show(shape)} has more than 2**63 elements")
    return tuple(shape)


def is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LIMIT


def parse_byte_size(text: str, what: str) -> int:
    """Return the bytes of a size such as 5GB; `what` names it in the message."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]I?B)?", text.strip().upper())
    size = float(match[1]) * _UNITS.get(match[2] or "", 0) if match is not None else 0.0
    if not 1 <= size < 2**63:
        raise CheckpointError(f"{what} {text}: expected a size such as 5GB, 500MB or 2GiB")
    return int(size)


def show(value: Any) -> str:
    """Return a value for a message, never longer than a line."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, (list, tuple)):
        text = str(list(value)) if len(value) <= MAX_DIMS and all(is_size(item) for item in value) else "a list"
    elif value is None or isinstance(value, (str, bool, int, float)):
        text = json.dumps(value) if not isinstance(value, int) or value.bit_length() <= MAX_BITS else "a huge number"
    else:
        text = type(value).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."


@contextlib.contextmanager
def failing(sentence: str) -> Iterator[None]:
    """Turn an OSError in the block into a `CheckpointError` that says what was tried."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{sentence} ({error.strerror or error})") from error
