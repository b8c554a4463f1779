"""A source that reads shardwell's own checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwell.checkpoint.boxes import Region, full_region, order_of, reordered
from shardwell.checkpoint.described_values import check_described
from shardwell.checkpoint.manifest import Manifest
from shardwell.checkpoint.pieces import BoxPiece, TensorRecord, check_range, plan
from shardwell.checkpoint.reader import Reader, allocate_flat
from shardwell.checkpoint.sources.base import MODEL, StoredTensor
from shardwell.checkpoint.sources.reading import gather
from shardwell.errors import CheckpointError


class ShardwellSource:
    """A committed checkpoint: its directory, and the manifest that was read from it. `shares`: see `Reader`."""

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any]

    def __init__(self, path: Path, manifest: Manifest, *, shares: bool = False) -> None:
        self.where = str(path)
        check_described(manifest.values, self.where)
        self.tensors = {name: StoredTensor(r.dtype, r.shape, r.stride) for name, r in manifest.tensors.items()}
        buffers = [name.removeprefix(MODEL) for name, r in manifest.tensors.items() if r.kind == "buffer"]
        self.values = {"buffers": buffers, **manifest.values} if buffers else manifest.values
        self._path, self._manifest, self._shares = path, manifest, shares
        self._readers: dict[str, Reader] = {}
        self._lock = threading.Lock()

    @property
    def bytes_read(self) -> int:
        return sum(reader.bytes_read for reader in self._readers.values())

    @property
    def bytes_beside(self) -> int:
        """The bytes that were read only for checksums."""
        return sum(reader.bytes_beside for reader in self._readers.values())

    def read(self, name: str, start: int, stop: int) -> Tensor:
        record = self._find(name)
        check_range(record, start, stop)
        flat = allocate_flat(stop - start, record.dtype, f"{self.where}: tensor {name!r}")
        self.read_into(name, start, flat)
        return flat

    def read_into(self, name: str, start: int, flat: Tensor) -> None:
        """Fill a tensor of the stored dtype with elements from `start` on."""
        record, stop = self._find(name), start + flat.numel()
        if record.is_boxed:
            check_range(record, start, stop)
            self._fill_from_boxes(name, record, Region(_all_of(record).box, start, stop), flat)
            return
        at = 0
        for one in plan(record, start, stop):
            numel = one.last - one.first
            self._reader(one.file).read_into(one.key, one.first, flat[at : at + numel])
            at += numel

    def read_region(self, name: str, target: Region, flat: Tensor) -> None:
        """Fill a tensor of the stored dtype with a region, whose dimensions are in the stored order."""
        record = self._find(name)
        if record.is_boxed:
            self._fill_from_boxes(name, record, target, flat)
        else:
            gather(target, _all_of(record), flat, lambda first, out: self.read_into(name, first, out))

    def _fill_from_boxes(self, name: str, record: TensorRecord, target: Region, flat: Tensor) -> None:
        num_filled = 0
        for one in record.boxes:
            for piece, held in one.touching(target):
                num_filled += gather(target, held, flat, partial(self._read_piece, name, piece))
        if num_filled != flat.numel():
            raise CheckpointError(
                f"{self.where}: tensor {name!r}: {flat.numel()} elements wanted, {num_filled} are in its pieces"
            )

    def _read_piece(self, name: str, piece: BoxPiece, first: int, out: Tensor) -> None:
        reader = self._reader(piece.file)
        held = reader.entries[piece.key].numel
        if held != piece.numel:
            raise CheckpointError(
                f"{reader.path}: tensor {name!r}: {held} elements under {piece.key!r}; the manifest says {piece.numel}"
            )
        reader.read_into(piece.key, first, out)

    def _find(self, name: str) -> TensorRecord:
        if name not in self._manifest.tensors:
            raise CheckpointError(f"{self.where}: tensor {name!r}: not in this checkpoint")
        return self._manifest.tensors[name]

    def _reader(self, file: str) -> Reader:
        with self._lock:
            if file not in self._readers:
                self._readers[file] = Reader(self._path / file, self._manifest.files[file], shares=self._shares)
            return self._readers[file]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


def _all_of(record: TensorRecord) -> Region:
    return full_region(reordered(record.shape, order_of(record.stride)))
