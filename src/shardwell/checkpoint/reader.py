"""Reads tensors from safetensors files, in full or in part, and checks them against checksums.

The content of a file is not trusted: a header is validated in full before anything is allocated, and no allocation is
larger than the file. In a file with a record, every byte that is read is covered by a checksum; for a partial read
these are the checksums of the blocks that it touches.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shardwell.checkpoint.checksums import ALGORITHM, DIGITS, shown
from shardwell.checkpoint.files import CHUNK, MAX_HEADER, METADATA, Entry, FileRecord, bytes_of
from shardwell.checkpoint.parsing import (
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
from shardwell.kernels import FileRead, crc32, read_blocks

PART = 2**25  # bytes of one read that is checked in small parts: a signal waits for its end


def allocate_flat(numel: int, dtype: torch.dtype, where: str) -> Tensor:
    """Return an uninitialised 1D tensor."""
    try:
        return torch.empty(numel, dtype=dtype, device="cpu")
    except (RuntimeError, MemoryError):
        raise CheckpointError(f"{where}: not enough memory for {numel * dtype.itemsize} bytes") from None


class Reader:
    """An open file of tensors with a valid header. With a record, everything that is read is checked against it.

    A symbolic link is not followed. With `shares`, other ranks read the rest at the same time, and an error of one is
    an error of all. Then a tensor without checksums of blocks is checked only by the rank that reads its first byte.
    """

    def __init__(self, path: str | os.PathLike[str], record: FileRecord | None = None, *, shares: bool = False) -> None:
        self.path = Path(path)
        self.bytes_read = 0  # of the data, since it was opened
        self.bytes_beside = 0  # of these, bytes that were read only for checksums
        self._lock = threading.Lock()
        self._record, self._shares = record, shares
        self._verified: set[str] = set()  # tensors that were read in part, and checked in full
        self._file, self.size = open_plain(self.path)
        try:
            header = self._read_header()
            if record is not None:
                self._check_record(record, header)
            self.entries, self._offsets, self.metadata = _parse_header(header[8:], self.size, str(self.path))
            if record is not None:
                self._check_tensors(record)
        except BaseException:
            self.close()
            raise

    def read(self, name: str, checksum: str | None = None) -> Tensor:
        """Return the full tensor, checked against `checksum`, or against the record if there is one."""
        entry = self._entry(name)
        flat = allocate_flat(entry.numel, entry.dtype, self._where(name))
        self._take(entry, flat, checksum or self._recorded(name))
        return flat.view(entry.shape)

    def read_range(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` of the flat tensor."""
        entry = self._entry(name)
        self._check_range(entry, start, stop)
        return self.read_into(name, start, allocate_flat(stop - start, entry.dtype, self._where(name)))

    def read_into(self, name: str, start: int, flat: Tensor) -> Tensor:
        """Fill a 1D tensor of the same dtype with elements from `start` on."""
        entry = self._entry(name)
        self._check_range(entry, start, start + flat.numel())
        if flat.dtype != entry.dtype or flat.device.type != "cpu" or not flat.is_contiguous():
            raise CheckpointError(f"{self._where(name)}: expected room for {entry.dtype} on cpu, found {flat.dtype}")
        if flat.numel() == entry.numel:
            self._take(entry, flat, self._recorded(name))
        elif flat.numel():
            self._take_part(entry, start, flat)
        return flat

    def verify(self, name: str, checksum: str | None = None) -> None:
        """Read a tensor's bytes chunk by chunk, and raise if they do not match the checksum."""
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
        if record.header != shown(crc32(header)):
            raise CheckpointError(f"{self.path}: the header is damaged: it does not match its checksum")

    def _check_tensors(self, record: FileRecord) -> None:
        if record.checksums.keys() != self.entries.keys():
            raise CheckpointError(f"{self.path}: holds other tensors than recorded")
        for name, entry in self.entries.items() if record.block else ():
            expected = -(-entry.num_bytes // record.block)
            found = len(record.blocks.get(name, "")) // DIGITS
            if found != (expected if expected > 1 else 0):
                raise CheckpointError(
                    f"{self._where(name)}: {expected} blocks of {record.block} bytes, and checksums of {found} recorded"
                )

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

    def _take(self, entry: Entry, flat: Tensor, checksum: str | None) -> None:
        """Fill a tensor with all elements, and check them if there is a checksum."""
        view, value = bytes_of(flat), 0
        if checksum is None:
            self._pull_unchecked(entry, 0, view)
        else:
            for first in range(0, len(view), PART):
                part = view[first : first + PART]
                value = int.from_bytes(self._pull_blocks(entry, first, part, len(part), value=value), "big")
            self._compare(entry.name, value, checksum)
        self._check_values(entry, flat)

    def _take_part(self, entry: Entry, start: int, flat: Tensor) -> None:
        """Fill a tensor with some of the elements, and check them if there is a record."""
        view, first, record = bytes_of(flat), start * entry.dtype.itemsize, self._record
        if record is not None and entry.name in record.blocks:
            self._take_blocks(entry, first, view, record.blocks[entry.name], record.block)
        elif record is not None and (record.block or entry.num_bytes <= CHUNK):  # a block of its own
            self._take_blocks(entry, first, view, record.checksums[entry.name], entry.num_bytes)
        else:
            if record is not None and not (self._shares and start) and entry.name not in self._verified:
                self.verify(entry.name)
                self._count(beside=entry.num_bytes)
                self._verified.add(entry.name)
            self._pull_unchecked(entry, first, view)
        self._check_values(entry, flat)

    def _take_blocks(self, entry: Entry, first: int, view: memoryview, sums: str, size: int) -> None:
        """Fill `view` from byte `first` of a tensor on, and check the blocks that it touches."""
        last = first + len(view)
        end = min(-(-last // size) * size, entry.num_bytes)
        step = max(PART // size, 1) * size
        for begin in range(first // size * size, end, step):
            wanted, stop = max(begin, first), min(begin + step, last)
            before, after = wanted - begin, min(begin + step, end) - stop
            part = view[wanted - first : stop - first]
            found, index = self._pull_blocks(entry, wanted, part, size, before, after).hex(), begin // size * DIGITS
            self._compare_blocks(entry.name, found, sums[index : index + len(found)])

    def _count(self, data: int = 0, beside: int = 0) -> None:
        with self._lock:
            self.bytes_read += data
            self.bytes_beside += beside

    def _check_values(self, entry: Entry, flat: Tensor) -> None:
        if entry.dtype == torch.bool and flat.numel() and int(flat.view(torch.uint8).max()) > 1:
            raise CheckpointError(f"{self._where(entry.name)}: holds bytes that are neither true nor false")

    def _pull(self, offset: int, view: memoryview, what: str) -> None:
        """Fill `view` with the bytes of the file from `offset` on."""
        while view:
            with failing(f"{self.path}: {what}: cannot be read"):
                num_bytes = os.preadv(self._file.fileno(), [view], offset)
            if not num_bytes:
                raise CheckpointError(f"{self.path}: {what}: the file is truncated")
            view, offset = view[num_bytes:], offset + num_bytes

    def _pull_data(self, entry: Entry, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a tensor from `start` on."""
        self._pull(self._offsets[entry.name] + start, view, f"tensor {show(entry.name)}")
        self._count(len(view))

    def _pull_unchecked(self, entry: Entry, start: int, view: memoryview) -> None:
        """Fill `view` in small parts."""
        for at in range(0, len(view), CHUNK):
            self._pull_data(entry, start + at, view[at : at + CHUNK])

    def _pull_blocks(
        self, entry: Entry, start: int, view: memoryview, block: int, before: int = 0, after: int = 0, value: int = 0
    ) -> bytes:
        """Fill `view`, read bytes before and after it, too, and return the checksums of the blocks of all of them."""
        offset = self._offsets[entry.name] + start - before
        read = FileRead(self._file.fileno(), offset, view, block, before, after, value)
        try:
            sums = read_blocks(read)
        except OSError as error:
            raise CheckpointError(f"{self._where(entry.name)}: cannot be read ({error.strerror or error})") from error
        except EOFError:
            raise CheckpointError(f"{self._where(entry.name)}: the file is truncated") from None
        self._count(read.num_bytes, before + after)
        return sums

    def _compare_blocks(self, name: str, found: str, expected: str) -> None:
        for at in range(0, len(found), DIGITS) if found != expected else ():
            self._compare(name, int(found[at : at + DIGITS], 16), expected[at : at + DIGITS])

    def _compare(self, name: str, value: int, expected: str) -> None:
        found = shown(value)
        if found != expected:
            raise CheckpointError(f"{self._where(name)}: damaged: {ALGORITHM} is {found}, recorded was {expected}")


def _parse_header(header: bytes, size: int, where: str) -> tuple[dict[str, Entry], dict[str, int], dict[str, str]]:
    """Return the entries, their offsets in the file, and the metadata."""
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
