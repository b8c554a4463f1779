"""A source that reads shardwell's own checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwell.checkpoint.manifest import FileExtent, Manifest, plan
from shardwell.checkpoint.reader import Reader, room
from shardwell.checkpoint.sources.base import StoredTensor
from shardwell.errors import CheckpointError


class ShardwellSource:
    """A committed checkpoint: its directory, and the manifest that was read from it. `shares`: see `Reader`."""

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any]

    def __init__(self, path: Path, manifest: Manifest, *, shares: bool = False) -> None:
        self.where = str(path)
        self.tensors = {name: StoredTensor(r.dtype, r.shape, r.stride) for name, r in manifest.tensors.items()}
        self.values = manifest.values
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
        extents = self._plan(name, start, stop)
        return self._fill(extents, room(stop - start, self.tensors[name].dtype, f"{self.where}: tensor {name!r}"))

    def read_into(self, name: str, start: int, flat: Tensor) -> None:
        """Fill a tensor of the stored dtype with elements from `start` on."""
        self._fill(self._plan(name, start, start + flat.numel()), flat)

    def _plan(self, name: str, start: int, stop: int) -> list[FileExtent]:
        if name not in self._manifest.tensors:
            raise CheckpointError(f"{self.where}: tensor {name!r}: not in this checkpoint")
        return plan(self._manifest.tensors[name], start, stop)

    def _fill(self, extents: list[FileExtent], flat: Tensor) -> Tensor:
        at = 0
        for one in extents:
            numel = one.last - one.first
            self._reader(one.file).read_into(one.key, one.first, flat[at : at + numel])
            at += numel
        return flat

    def _reader(self, file: str) -> Reader:
        with self._lock:
            if file not in self._readers:
                self._readers[file] = Reader(self._path / file, self._manifest.files[file], shares=self._shares)
            return self._readers[file]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
