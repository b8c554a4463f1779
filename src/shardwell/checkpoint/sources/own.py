"""shardwell's own checkpoints as a source."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwell.checkpoint.files import Reader
from shardwell.checkpoint.manifest import Manifest, plan
from shardwell.checkpoint.sources.base import Stored
from shardwell.errors import CheckpointError


class OwnSource:
    """A committed checkpoint: its directory, and the manifest that was read from it."""

    tensors: Mapping[str, Stored]
    values: Mapping[str, Any]

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.where = str(path)
        self.tensors = {name: Stored(r.dtype, r.shape, r.stride) for name, r in manifest.tensors.items()}
        self.values = manifest.values
        self._path, self._manifest = path, manifest
        self._readers: dict[str, Reader] = {}
        self._lock = threading.Lock()

    @property
    def bytes_read(self) -> int:
        return sum(reader.bytes_read for reader in self._readers.values())

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._manifest.tensors:
            raise CheckpointError(f"{self.where}: tensor {name!r}: not in this checkpoint")
        record = self._manifest.tensors[name]
        extents = plan(record, start, stop)
        parts = [self._reader(one.file).read_range(one.key, one.first, one.last) for one in extents]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=record.dtype)

    def _reader(self, file: str) -> Reader:
        with self._lock:
            if file not in self._readers:
                self._readers[file] = Reader(self._path / file, self._manifest.files[file])
            return self._readers[file]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
