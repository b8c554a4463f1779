"""A source that reads models in the safetensors format: one file, or a directory as Hugging Face writes it.

    model.safetensors                                       all tensors in one file, or
    model-00001-of-00002.safetensors                        in several,
    model.safetensors.index.json                            {"weight_map": {tensor: file}}
    config.json                                             the model's configuration, if there is one

The index is not trusted: it may name only files in its own directory, and each tensor must be in the file it says.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwell.checkpoint.files import Entry
from shardwell.checkpoint.manifest import plain_name
from shardwell.checkpoint.parsing import failing, open_plain, parse_json, show
from shardwell.checkpoint.reader import Reader
from shardwell.checkpoint.sources.base import MODEL, StoredTensor
from shardwell.errors import CheckpointError

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_MAX_JSON = 2**28  # bytes


class SafetensorsSource:
    """The tensors of a model. `rename` returns the model's own name for a name in the file."""

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any]

    def __init__(self, path: str | os.PathLike[str], rename: Callable[[str], str] | None = None) -> None:
        self.where = str(path)
        found = find(Path(path))
        if found is None:
            raise CheckpointError(f"{path}: no {SINGLE}, no {INDEX}, and not exactly one other {SUFFIX} file")
        self._root = found.parent
        self._readers: dict[str, Reader] = {}
        self._lock = threading.Lock()
        self._bytes_closed = 0
        if found.name.endswith(INDEX_SUFFIX):
            entries = self._indexed(found)
        else:
            entries = [(found.name, entry) for entry in self._entries(found.name).values()]
        self._places = _places(entries, rename or (lambda name: name), self.where)
        self.tensors = {name: StoredTensor(entry.dtype, entry.shape) for name, (_, entry) in self._places.items()}
        self.values = {} if Path(path).is_file() else _config(self._root / CONFIG)

    @property
    def bytes_read(self) -> int:
        return self._bytes_closed + sum(reader.bytes_read for reader in self._readers.values())

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._places:
            raise CheckpointError(f"{self.where}: tensor {name!r}: not in this checkpoint")
        file, entry = self._places[name]
        return self._reader(file).read_range(entry.name, start, stop)

    def close(self) -> None:
        with self._lock:
            self._bytes_closed = self.bytes_read
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()

    def _indexed(self, index: Path) -> list[tuple[str, Entry]]:
        """Return each tensor of the index with its file; raise unless all files hold exactly what the index says."""
        weights = _weight_map(index)
        found: dict[str, tuple[str, Entry]] = {}
        for file in dict.fromkeys(weights.values()):
            for name, entry in self._entries(file).items():
                if weights.get(name) != file:
                    said = f"in {weights[name]}" if name in weights else "in no file"
                    raise CheckpointError(
                        f"{self._root / file}: holds tensor {show(name)}; by {index.name} it is {said}"
                    )
                found[name] = file, entry
        for name, file in weights.items():
            if name not in found:
                raise CheckpointError(
                    f"{self._root / file}: tensor {show(name)}: missing; {index.name} says it is here"
                )
        return list(found.values())

    def _entries(self, file: str) -> Mapping[str, Entry]:
        with self._open(file) as reader:
            return reader.entries

    def _open(self, file: str) -> Reader:
        """Open a file. Links are followed, because the cache of Hugging Face consists of them."""
        path = self._root / file
        if not path.is_symlink():
            return Reader(path)
        try:
            return Reader(path.resolve())
        except CheckpointError as error:
            raise CheckpointError(f"{path}: a link: {error}") from error

    def _reader(self, file: str) -> Reader:
        with self._lock:
            if file not in self._readers:
                self._readers[file] = self._open(file)
            return self._readers[file]


def find(path: Path) -> Path | None:
    """Return the file or the index that holds the tensors of a path; None if it is no such model."""
    if path.is_file():
        return path if path.name.endswith(SUFFIX) else None
    for name in (SINGLE, INDEX):
        if (path / name).is_file():
            return path / name
    with failing(f"{path}: cannot be read"):
        names = os.listdir(path) if path.is_dir() else []
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = indexes or [name for name in names if name.endswith(SUFFIX)]
    return path / files[0] if len(files) == 1 else None


def _weight_map(index: Path) -> dict[str, str]:
    content = _json(index)
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{index}: weight_map: expected an object of tensors and files, found {show(weights)}")
    for name, file in weights.items():
        if not plain_name(file):
            raise CheckpointError(
                f"{index}: weight_map[{show(name)}]: expected the name of a file beside the index, found {show(file)}"
            )
        if not (index.parent / file).exists():
            raise CheckpointError(f"{index.parent / file}: missing; {index.name} says that it holds {show(name)}")
    return weights


def _places(entries: list[tuple[str, Entry]], rename: Callable[[str], str], where: str) -> dict[str, tuple[str, Entry]]:
    places: dict[str, tuple[str, Entry]] = {}
    for file, entry in entries:
        name = MODEL + rename(entry.name)
        if name in places:
            raise CheckpointError(
                f"{where}: {show(places[name][1].name)} and {show(entry.name)} are both renamed {name}"
            )
        places[name] = file, entry
    return places


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return {"model_config": _json(path)}
    except CheckpointError as error:
        warnings.warn(f"the weights are read without the model's configuration: {error}", stacklevel=3)
        return {}


def _json(path: Path) -> Any:
    file, size = open_plain(path.resolve())
    with file, failing(f"{path}: cannot be read"):
        if size > _MAX_JSON:
            raise CheckpointError(f"{path}: {size} bytes; expected at most {_MAX_JSON}")
        return parse_json(file.readall(), str(path))
