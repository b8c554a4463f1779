"""Tensors in files, in the safetensors format: written as a stream, read in part, checked against checksums.

    | length (8 bytes) | header: JSON, padded with spaces | data of the tensors, back to back |

Nothing that a file says is trusted: a header is validated in full before anything is allocated, and what is allocated
is never larger than the file. The checksums find damage, not forgery.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor

from shardwell.checkpoint.parsing import (
    CODES,
    DTYPES,
    LIMIT,
    failing,
    is_size,
    open_plain,
    parse_dtype,
    parse_json,
    parse_shape,
    show,
)
from shardwell.errors import CheckpointError
from shardwell.layout import product
from shardwell.memory.limits import num_cores
from shardwell.native import crc32

# Measured on one core of a Xeon with AVX-512: zlib's crc32 1.7 to 2.5 GB/s, sha256 1.2 GB/s, blake2b 0.7 GB/s; the
# compiled crc32 7 GB/s, and 14 to 37 where there are wide carry-less products.
ALGORITHM = "crc32"
CHECKSUM = re.compile("[0-9a-f]{8}")

MAX_HEADER = 100_000_000  # the limit of the safetensors package
CHUNK = 2**19  # bytes that are read or written at once, small enough to be in the cache for the checksum
AHEAD = 2**24  # bytes after which the disk is told to begin; else it would idle until all is written
METADATA = "__metadata__"


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return product(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class FileRecord:
    """What is known of a file that was written whole."""

    size: int
    header: str  # the checksum of everything before the data
    checksums: Mapping[str, str]  # by tensor
    algorithm: str = ALGORITHM


# --- writing ----------------------------------------------------------------------------------------------------


def write(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Writes CPU tensors to a new file; see `stream`."""
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return stream(path, entries, tensors.__getitem__, metadata)


def stream(
    path: str | os.PathLike[str],
    entries: Iterable[Entry],
    data: Callable[[str], Tensor | Iterable[Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Writes tensors to a new file, one after the other, and returns when it is on the disk.

    `data(name)` is asked once for each tensor, when its turn comes: for the tensor, or for parts of it in order, so
    that no more than a part need be in memory. Wide dtypes come first, otherwise the order is that of `entries`.
    If anything fails, no file is left.
    """
    path = Path(path)
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)  # so that each tensor is aligned
    header = _header(ordered, metadata or {}, path)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be created ({error.strerror})") from error
    try:
        try:
            record = _fill(descriptor, header, ordered, data, path)
        finally:
            with failing(f"{path}: cannot be written"):
                os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return record


def _header(entries: list[Entry], metadata: Mapping[str, str], path: Path) -> bytes:
    content: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise CheckpointError(f"{path}: metadata {show(key)}: expected a string, found {show(value)}")
    offset = 0
    for entry in entries:
        where = f"{path}: tensor {show(entry.name)}"
        if entry.name == METADATA or entry.name in content:
            raise CheckpointError(f"{where}: the name is taken; give each tensor a name of its own")
        if entry.dtype not in CODES:
            raise CheckpointError(f"{where}: {entry.dtype} cannot be stored; expected one of {', '.join(DTYPES)}")
        end = offset + entry.num_bytes
        content[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    try:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{path}: a name or metadata is no text in UTF-8 ({error.reason})") from None
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"{path}: too many tensors for one file: a header of {len(text)} bytes; use more files")
    return len(text).to_bytes(8, "little") + text


def _fill(
    descriptor: int,
    header: bytes,
    entries: list[Entry],
    data: Callable[[str], Tensor | Iterable[Tensor]],
    path: Path,
) -> FileRecord:
    output, checksums = _Output(descriptor), {}
    head = output.put(memoryview(header), 0, f"{path}: header")
    for entry in entries:
        where = f"{path}: tensor {show(entry.name)}"
        given = data(entry.name)
        value = numel = 0
        for part in (given,) if isinstance(given, Tensor) else given:
            numel += part.numel()
            if part.dtype != entry.dtype or numel > entry.numel:
                raise CheckpointError(
                    f"{where}: expected {entry.numel} elements of {entry.dtype}, found {numel} of {part.dtype}"
                )
            flat = _on_host(part, where)
            value = output.put(_bytes_of(flat), value, where)
        if numel != entry.numel:
            raise CheckpointError(f"{where}: expected {entry.numel} elements, found {numel}")
        checksums[entry.name] = f"{value:08x}"
    with failing(f"{path}: cannot be written"):
        os.fsync(descriptor)
    return FileRecord(output.size, f"{head:08x}", checksums)


class _Output:
    """A file that is written from its beginning to its end. The disk works while more is written."""

    def __init__(self, descriptor: int) -> None:
        self.size = 0
        self._descriptor = descriptor
        self._begun = 0  # bytes that the disk was told of
        self._is_helped = _has_spare_core()

    def put(self, view: memoryview, value: int, where: str) -> int:
        """Writes bytes; the checksum so far becomes the one that includes them."""
        chunks = [view[start : start + CHUNK] for start in range(0, len(view), CHUNK)]
        if self._is_helped and len(chunks) > 2:
            with _checksum_beside(view, value) as result:
                for chunk in chunks:
                    self._write(chunk, where)
            return result[0]
        for chunk in chunks:
            value = crc32(chunk, value)
            self._write(chunk, where)
        return value

    def _write(self, rest: memoryview, where: str) -> None:
        self.size += len(rest)
        with failing(f"{where}: cannot be written"):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        if _begin_writing is not None and self.size - self._begun >= AHEAD:
            _begin_writing(self._descriptor, self._begun, self.size - self._begun, _SYNC_FILE_RANGE_WRITE)
            self._begun = self.size


@contextlib.contextmanager
def _checksum_beside(view: memoryview, value: int) -> Iterator[list[int]]:
    """A thread that computes a checksum: it is in the list afterwards. No pool, which could not be used at exit."""
    result: list[int] = []
    thread = threading.Thread(target=lambda: result.append(crc32(view, value)))
    thread.start()
    try:
        yield result
    finally:
        thread.join()


def _has_spare_core() -> bool:
    """Each rank here has a second core. Without one, a checksum is cheapest while its bytes are in the cache."""
    return num_cores() >= 2 * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


_SYNC_FILE_RANGE_WRITE = 2


def _find_begin_writing() -> Callable[[int, int, int, int], int] | None:
    """Linux's sync_file_range, where there is one. It is a hint: what it returns does not matter."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast(Callable[[int, int, int, int], int], function)


_begin_writing = _find_begin_writing()


def _on_host(tensor: Tensor, where: str) -> Tensor:
    """1D, a CPU tensor; a copy, if its elements do not lie one after the other."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise CheckpointError(f"{where}: expected a dense tensor on cpu, found {tensor.layout} on {tensor.device}")
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor, which must outlive this. Not through numpy: torch never resizes a storage it has seen."""
    size = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr() if size else 1)).cast("B")


# --- reading ----------------------------------------------------------------------------------------------------


def room(numel: int, dtype: torch.dtype, where: str) -> Tensor:
    """1D, unfilled."""
    try:
        return torch.empty(numel, dtype=dtype, device="cpu")
    except (RuntimeError, MemoryError):
        raise CheckpointError(f"{where}: not enough memory for {numel * dtype.itemsize} bytes") from None


class Reader:
    """An open file of tensors, with a valid header. With a record, what is read whole is checked against it.

    Reads touch no other bytes than those asked for. A symbolic link is not followed.
    """

    def __init__(self, path: str | os.PathLike[str], record: FileRecord | None = None) -> None:
        self.path = Path(path)
        self.bytes_read = 0  # of the data, since it was opened
        self._lock = threading.Lock()
        self._record = record
        self._file, self.size = open_plain(self.path)
        try:
            header = self._read_header()
            if record is not None:
                self._check_record(record, header)
            self.entries, self._offsets, self.metadata = _parse_header(header[8:], self.size, str(self.path))
            if record is not None and record.checksums.keys() != self.entries.keys():
                raise CheckpointError(f"{self.path}: holds other tensors than recorded")
        except BaseException:
            self.close()
            raise

    def read(self, name: str, checksum: str | None = None) -> Tensor:
        """The tensor, whole; checked against `checksum`, or against the record if there is one."""
        entry = self._entry(name)
        flat = room(entry.numel, entry.dtype, self._where(name))
        self._take(entry, 0, flat, checksum or self._recorded(name))
        return flat.view(entry.shape)

    def read_range(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of the flat tensor. Checked only if that is all of it and there is a record."""
        entry = self._entry(name)
        self._check_range(entry, start, stop)
        return self.read_into(name, start, room(stop - start, entry.dtype, self._where(name)))

    def read_into(self, name: str, start: int, flat: Tensor) -> Tensor:
        """Fills a 1D tensor of the same dtype with elements from `start` on; see `read_range`."""
        entry = self._entry(name)
        self._check_range(entry, start, start + flat.numel())
        if flat.dtype != entry.dtype or flat.device.type != "cpu" or not flat.is_contiguous():
            raise CheckpointError(f"{self._where(name)}: expected room for {entry.dtype} on cpu, found {flat.dtype}")
        self._take(entry, start, flat, self._recorded(name) if flat.numel() == entry.numel else None)
        return flat

    def verify(self, name: str, checksum: str | None = None) -> None:
        """Reads a tensor's bytes, a chunk at a time, and raises if they are not those of the checksum."""
        entry = self._entry(name)
        expected = checksum or self._recorded(name)
        if expected is None:
            raise CheckpointError(f"{self._where(name)}: no checksum to verify it against")
        buffer, value = memoryview(bytearray(min(CHUNK, entry.num_bytes))), 0
        for start in range(0, entry.num_bytes, CHUNK):
            part = buffer[: min(CHUNK, entry.num_bytes - start)]
            self._pull_data(entry, start, part)
            value = crc32(part, value)
        self._compare(name, value, expected)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_header(self) -> bytes:
        first = bytearray(8)
        self._pull(0, memoryview(first), "length")
        length = int.from_bytes(first, "little")
        if length > min(MAX_HEADER, self.size - 8):
            raise CheckpointError(
                f"{self.path}: truncated, or no safetensors file: {self.size} bytes with a header of {length}"
            )
        header = bytearray(length)
        self._pull(8, memoryview(header), "header")
        return bytes(first + header)

    def _check_record(self, record: FileRecord, header: bytes) -> None:
        if record.algorithm != ALGORITHM:
            raise CheckpointError(
                f"{self.path}: checksums of algorithm {show(record.algorithm)}; expected {show(ALGORITHM)}"
            )
        if record.size != self.size:
            raise CheckpointError(f"{self.path}: {self.size} bytes, {record.size} were written; it was cut or changed")
        if record.header != f"{crc32(header):08x}":
            raise CheckpointError(f"{self.path}: the header is damaged: it does not match its checksum")

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise CheckpointError(f"{self._where(name)}: not in this file")
        return self.entries[name]

    def _where(self, name: str) -> str:
        return f"{self.path}: tensor {show(name)}"

    def _check_range(self, entry: Entry, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= entry.numel:
            raise CheckpointError(f"{self._where(entry.name)}: has {entry.numel} elements, asked for {start} to {stop}")

    def _recorded(self, name: str) -> str | None:
        return None if self._record is None else self._record.checksums[name]

    def _take(self, entry: Entry, start: int, flat: Tensor, checksum: str | None) -> None:
        """Fills a tensor from element `start` on, and checks it if there is a checksum."""
        view, value = _bytes_of(flat), 0
        for first in range(0, len(view), CHUNK):
            part = view[first : first + CHUNK]
            self._pull_data(entry, start * entry.dtype.itemsize + first, part)
            if checksum is not None:
                value = crc32(part, value)
        if checksum is not None:
            self._compare(entry.name, value, checksum)
        if entry.dtype == torch.bool and flat.numel() and int(flat.view(torch.uint8).max()) > 1:
            raise CheckpointError(f"{self._where(entry.name)}: holds bytes that are neither true nor false")

    def _pull(self, offset: int, view: memoryview, what: str) -> None:
        """Fills `view` with the bytes of the file from `offset` on."""
        while view:
            with failing(f"{self.path}: {what}: cannot be read"):
                num_bytes = os.preadv(self._file.fileno(), [view], offset)
            if not num_bytes:
                raise CheckpointError(f"{self.path}: {what}: the file is truncated")
            view, offset = view[num_bytes:], offset + num_bytes

    def _pull_data(self, entry: Entry, start: int, view: memoryview) -> None:
        """Fills `view` with the bytes of a tensor from `start` on."""
        self._pull(self._offsets[entry.name] + start, view, f"tensor {show(entry.name)}")
        with self._lock:
            self.bytes_read += len(view)

    def _compare(self, name: str, value: int, expected: str) -> None:
        if f"{value:08x}" != expected:
            raise CheckpointError(f"{self._where(name)}: damaged: {ALGORITHM} is {value:08x}, recorded was {expected}")


def _parse_header(header: bytes, size: int, where: str) -> tuple[dict[str, Entry], dict[str, int], dict[str, str]]:
    """The entries, where each begins in the file, and the metadata."""
    content = parse_json(header, where)
    if not isinstance(content, dict):
        raise CheckpointError(f"{where}: expected a JSON object as header, found {show(content)}")
    metadata = content.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: {METADATA}: expected an object of strings")
    begin = 8 + len(header)
    found = sorted((_parse_entry(name, raw, where) for name, raw in content.items()), key=lambda item: item[1:])
    reached = 0
    for entry, start, end in found:
        if start != reached:
            raise CheckpointError(f"{where}: tensor {show(entry.name)}: begins at {start}, expected {reached}")
        reached = end
    if reached != size - begin:
        raise CheckpointError(f"{where}: truncated or too long: {size - begin} bytes of data, expected {reached}")
    entries = {entry.name: entry for entry, _, _ in found}
    return entries, {entry.name: begin + start for entry, start, _ in found}, metadata


def _parse_entry(name: str, raw: Any, where: str) -> tuple[Entry, int, int]:
    where = f"{where}: tensor {show(name)}"
    if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected an object of dtype, shape and data_offsets")
    entry = Entry(name, parse_dtype(raw["dtype"], where), parse_shape(raw["shape"], where))
    offsets = raw["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_size(offset) for offset in offsets):
        raise CheckpointError(f"{where}: data_offsets: expected two sizes, found {show(offsets)}")
    if entry.num_bytes >= LIMIT or offsets[1] - offsets[0] != entry.num_bytes:
        raise CheckpointError(f"{where}: data_offsets: expected {entry.num_bytes} bytes, found {offsets}")
    return entry, offsets[0], offsets[1]
