"""Tensors in files in the safetensors format: written as a stream, read in part, checked against checksums.

    | length (8 bytes) | header: JSON, padded with spaces | data of the tensors, back to back |

The content of a file is not trusted: a header is validated in full before anything is allocated, and no allocation is
larger than the file. The checksums find damage, not forgery.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from shardwell.checkpoint import checksums
from shardwell.checkpoint.checksums import ALGORITHM, Sums
from shardwell.checkpoint.parsing import (
    CODES,
    DTYPES,
    failing,
    show,
)
from shardwell.errors import CheckpointError
from shardwell.memory.machine import current_machine
from shardwell.sharding.layout import product

MAX_HEADER = 100_000_000  # the limit of the safetensors package
CHUNK = 2**19  # bytes of one read or write, small enough to be in the cache for the checksum
AHEAD = 2**24  # bytes after which writeback starts; else the disk would idle until all is written
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
    """The facts about a file that was written completely."""

    size: int
    header: str  # the checksum of everything before the data
    checksums: Mapping[str, str]  # by tensor
    algorithm: str = ALGORITHM
    blocks: Mapping[str, str] = field(default_factory=dict)  # by tensor, those of its blocks, if it has several
    block: int = 0  # bytes of a block; 0: none are known, it was written before there were any


def write(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write CPU tensors to a new file; see `stream`."""
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return stream(path, entries, tensors.__getitem__, metadata)


def stream(
    path: str | os.PathLike[str],
    entries: Iterable[Entry],
    data: Callable[[str], Tensor | Iterable[Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Write tensors to a new file, one after the other, and return when the file is synced to disk.

    `data(name)` is called once for each tensor, just before it is written, and returns the tensor, or its parts in
    order, so that only a part need be in memory. Wide dtypes come first; otherwise the order is that of `entries`. If
    anything fails, the file is removed.
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
    output, totals, blocks = _Output(descriptor), {}, {}
    output.put(memoryview(header), head := Sums(), f"{path}: header")
    for entry in entries:
        where = f"{path}: tensor {show(entry.name)}"
        given = data(entry.name)
        numel, sums = 0, Sums()
        for part in (given,) if isinstance(given, Tensor) else given:
            numel += part.numel()
            if part.dtype != entry.dtype or numel > entry.numel:
                raise CheckpointError(
                    f"{where}: expected {entry.numel} elements of {entry.dtype}, found {numel} of {part.dtype}"
                )
            flat = _on_host(part, where)
            output.put(bytes_of(flat), sums, where)
        if numel != entry.numel:
            raise CheckpointError(f"{where}: expected {entry.numel} elements, found {numel}")
        totals[entry.name] = sums.total
        if sums.blocks is not None:
            blocks[entry.name] = sums.blocks
    with failing(f"{path}: cannot be written"):
        os.fsync(descriptor)
    return FileRecord(output.size, head.total, totals, ALGORITHM, blocks, checksums.BLOCK)


class _Output:
    """A file that is written from its beginning to its end. Writeback to disk starts while more is written."""

    def __init__(self, descriptor: int) -> None:
        self.size = 0
        self._descriptor = descriptor
        self._begun = 0  # bytes whose writeback was started
        self._is_helped = _has_spare_core()

    def put(self, view: memoryview, sums: Sums, where: str) -> None:
        """Write bytes, and add them to the checksums."""
        chunks = [view[start : start + CHUNK] for start in range(0, len(view), CHUNK)]
        if self._is_helped and len(chunks) > 2:
            with _beside(lambda: sums.add(view)):
                for chunk in chunks:
                    self._write(chunk, where)
            return
        for chunk in chunks:
            sums.add(chunk)
            self._write(chunk, where)

    def _write(self, rest: memoryview, where: str) -> None:
        self.size += len(rest)
        with failing(f"{where}: cannot be written"):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        if _begin_writing is not None and self.size - self._begun >= AHEAD:
            _begin_writing(self._descriptor, self._begun, self.size - self._begun, _SYNC_FILE_RANGE_WRITE)
            self._begun = self.size


@contextlib.contextmanager
def _beside(work: Callable[[], object]) -> Iterator[None]:
    """Run a function on a thread during the block, or after it if no thread can be started; raise its error.

    A thread pool could not be used at exit.
    """
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    try:
        thread.start()
        is_begun = True
    except RuntimeError:  # the system has no thread left
        is_begun = False
    try:
        yield
    finally:
        if is_begun:
            thread.join()
        else:
            guarded()
    if errors:
        raise errors[0]


def _has_spare_core() -> bool:
    """Tell whether each rank here has a second core. Without one, a checksum is cheapest while bytes are in cache."""
    return current_machine().num_cores() >= 2 * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


_SYNC_FILE_RANGE_WRITE = 2


def _find_begin_writing() -> Callable[[int, int, int, int], int] | None:
    """Return Linux's sync_file_range, where it exists. It is a hint: its result does not matter."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast(Callable[[int, int, int, int], int], function)


_begin_writing = _find_begin_writing()


def _on_host(tensor: Tensor, where: str) -> Tensor:
    """Return a tensor as 1D on the CPU; a copy, unless it is contiguous there already."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise CheckpointError(f"{where}: expected a dense tensor on cpu, found {tensor.layout} on {tensor.device}")
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of a tensor's memory, which must outlive it.

    numpy is avoided, because torch never resizes a storage again that numpy has seen, and an array of ctypes, because
    each size of it is a new class.
    """
    size = tensor.numel() * tensor.itemsize
    return _view_of_memory(tensor.data_ptr(), size, _PYBUF_WRITE) if size else memoryview(b"")


_PYBUF_WRITE = 0x200
_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_view_of_memory.restype = ctypes.py_object
