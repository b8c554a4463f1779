"""Reads output of `torch.save` from a part of a file: the position of a tensor's elements, or a plain value.

`torch.save` writes a zip archive, and checkpoints put several of them into one file. An archive holds a pickle and,
uncompressed, the bytes of the storage of each tensor in it. The pickle is read as data.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwell.checkpoint.parsing import failing, is_size, open_plain, parse_shape, show
from shardwell.checkpoint.sources import pickles
from shardwell.errors import CheckpointError
from shardwell.sharding.layout import contiguous_stride, product

_MAX_MEMBER = 2**24  # bytes of a member other than the storage
_LOCAL = struct.Struct("<4s22xHH")  # of the header before a zip member: its signature, and two lengths at the end
_STORAGES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class ArchiveFile:
    """An open file from which several threads can read concurrently."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file, self.size = open_plain(path)

    def pull(self, offset: int, num_bytes: int) -> bytearray:
        """Return bytes from `offset` on; raise if the file ends before."""
        if offset + num_bytes > self.size:
            raise CheckpointError(f"{self.path}: truncated: {self.size} bytes, expected {offset + num_bytes}")
        data = bytearray(num_bytes)
        self.fill(offset, memoryview(data))
        return data

    def fill(self, offset: int, view: memoryview) -> None:
        while view:
            with failing(f"{self.path}: cannot be read"):
                num_bytes = os.preadv(self._file.fileno(), [view], offset)
            if not num_bytes:
                raise CheckpointError(f"{self.path}: truncated at byte {offset}")
            view, offset = view[num_bytes:], offset + num_bytes

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class SavedStorage:
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int  # the offset of its first element in the file

    @property
    def numel(self) -> int:
        return product(self.shape)

    @property
    def is_contiguous(self) -> bool:
        wanted = contiguous_stride(self.shape)
        return all(self.shape[dim] == 1 or self.stride[dim] == wanted[dim] for dim in range(len(self.shape)))

    def read(self, file: ArchiveFile, first: int, last: int) -> Tensor:
        """Return elements `first` to `last` of the flat tensor as 1D."""
        if first == last or self.numel == 0:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        if self.is_contiguous:
            return self._take(file, first, last)
        span = _reach(self.shape, self.stride)
        full = self._take(file, 0, span).as_strided(self.shape, self.stride)
        return full.reshape(-1)[first:last]

    def _take(self, file: ArchiveFile, first: int, last: int) -> Tensor:
        width = self.dtype.itemsize
        raw = torch.empty((last - first) * width, dtype=torch.uint8, device="cpu")
        file.fill(self.start + first * width, raw.numpy().data)
        if self.dtype == torch.bool and int(raw.max()) > 1:
            raise CheckpointError(f"{file.path}: holds bytes that are neither true nor false")
        return raw.view(self.dtype)


def load_value(file: ArchiveFile, offset: int, length: int, where: str) -> Any:
    """Return a saved value that is not a tensor: numbers, strings, lists and dictionaries of them."""
    return pickles.load(_Members(file, offset, length, where).read("data.pkl"), {}, where)


def locate(file: ArchiveFile, offset: int, length: int, where: str) -> SavedStorage:
    """Return the tensor that a part of a file holds."""
    members = _Members(file, offset, length, where)
    if "byteorder" in members and members.read("byteorder") != b"little":
        raise CheckpointError(f"{where}: its bytes are not in little-endian order")
    tensor = pickles.load(members.read("data.pkl"), _KNOWN, f"{where}: data.pkl", _storage)
    if not isinstance(tensor, _Tensor) or not isinstance(tensor.storage, _Storage):
        raise CheckpointError(f"{where}: expected a tensor, found {show(tensor)}")
    storage = tensor.storage
    dtype = storage.dtype or tensor.dtype
    shape = parse_shape(list(tensor.shape), where) if isinstance(tensor.shape, tuple) else None
    stride = tensor.stride
    if (
        shape is None
        or not isinstance(dtype, torch.dtype)
        or not isinstance(stride, tuple)
        or len(stride) != len(shape)
        or not all(is_size(size) for size in (*stride, tensor.offset))
    ):
        raise CheckpointError(f"{where}: expected a dense tensor with a dtype, a shape and a stride")
    start, num_bytes = members.place(f"data/{storage.key}")
    if (tensor.offset + _reach(shape, stride)) * dtype.itemsize > num_bytes:
        raise CheckpointError(f"{where}: {show(shape)} of {dtype} does not fit into a storage of {num_bytes} bytes")
    return SavedStorage(dtype, shape, stride, start + tensor.offset * dtype.itemsize)


def _reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of storage elements from a tensor's first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


class _Members:
    """The members of an archive in a part of a file; their names omit the folder that all share."""

    def __init__(self, file: ArchiveFile, offset: int, length: int, where: str) -> None:
        self._file, self._offset, self._length, self._where = file, offset, length, where
        try:
            with zipfile.ZipFile(_Slice(file, offset, length)) as archive:
                self._members = {info.filename: info for info in archive.infolist()}
        except Exception as error:  # anything can follow from bytes that are no archive
            raise CheckpointError(f"{where}: damaged, or not written by torch.save ({error})") from error
        roots = [name.removesuffix("data.pkl") for name in self._members if name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise CheckpointError(f"{where}: expected one pickle in the archive, found {len(roots)}")
        self._root = roots[0]

    def __contains__(self, name: str) -> bool:
        return self._root + name in self._members

    def place(self, name: str) -> tuple[int, int]:
        """Return the offset of a member in the file, and its size."""
        info = self._members.get(self._root + name)
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise CheckpointError(f"{self._where}: {name}: missing in the archive, or compressed")
        head = self._file.pull(self._offset + info.header_offset, _LOCAL.size)
        signature, len_name, len_extra = _LOCAL.unpack(head)
        start = info.header_offset + _LOCAL.size + len_name + len_extra
        if signature != b"PK\3\4" or start + info.file_size > self._length:
            raise CheckpointError(f"{self._where}: {name}: is outside of its archive")
        return self._offset + start, info.file_size

    def read(self, name: str) -> bytes:
        start, size = self.place(name)
        if size > _MAX_MEMBER:
            raise CheckpointError(f"{self._where}: {name}: {size} bytes; expected at most {_MAX_MEMBER}")
        return bytes(self._file.pull(start, size))


class _Slice(io.RawIOBase):
    """A part of a file, as a file object."""

    def __init__(self, file: ArchiveFile, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise OSError("before the start")
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        self._file.fill(self._offset + self._at, view)
        self._at += len(view)
        return len(view)


# --- contents of the pickle of a tensor -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype | None  # None: the tensor has it
    key: str


@dataclass(frozen=True)
class _Tensor:
    """A tensor as the pickle describes it, unchecked."""

    storage: Any
    offset: Any
    shape: Any
    stride: Any
    dtype: Any = None


def _storage(raw: Any) -> _Storage | None:
    """Return the storage of a persistent id: ("storage", type, key, device, number of elements)."""
    if not isinstance(raw, tuple) or len(raw) != 5 or raw[0] != "storage" or not isinstance(raw[2], str):
        return None
    return _Storage(raw[1] if isinstance(raw[1], torch.dtype) else None, raw[2])


def _rebuild_v2(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Tensor:
    return _Tensor(storage, offset, shape, stride)


def _rebuild_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> _Tensor:
    return _Tensor(storage, offset, shape, stride, dtype)


KNOWN_DTYPES: dict[str, torch.dtype] = {
    f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_KNOWN: dict[str, Any] = {
    "collections.OrderedDict": pickles.ordered,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch.storage.UntypedStorage": None,
    **{f"torch.{name}": dtype for name, dtype in _STORAGES.items()},
    **KNOWN_DTYPES,
}
