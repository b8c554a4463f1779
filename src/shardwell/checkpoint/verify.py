"""Checks every byte of a checkpoint against its checksum."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardwell.checkpoint.files import FileRecord
from shardwell.checkpoint.manifest import Manifest
from shardwell.checkpoint.parsing import show
from shardwell.checkpoint.reader import Reader
from shardwell.checkpoint.sources.base import Source
from shardwell.checkpoint.sources.reading import Progress, parts
from shardwell.errors import CheckpointError


def damages(path: Path, manifest: Manifest, progress: Progress | None = None) -> Iterator[str]:
    """Read all files of a committed checkpoint; yield each damage with the names of the file and the tensor."""
    owners = {
        (piece.file, piece.key): (name, piece.numel)
        for name, record in manifest.tensors.items()
        for piece in record.pieces
    }
    for name, record in manifest.files.items():
        yield from _damages_of(path / name, record, owners, progress)


def _damages_of(
    path: Path, record: FileRecord, owners: dict[tuple[str, str], tuple[str, int]], progress: Progress | None
) -> Iterator[str]:
    try:
        reader = Reader(path, record)
    except CheckpointError as error:
        lost = [owners[path.name, key][0] for key in record.checksums if (path.name, key) in owners]
        yield f"{error}; tensors in it: {', '.join(lost) or 'none'}"
        if progress is not None:
            progress(record.size)
        return
    with reader:
        for key, entry in reader.entries.items():
            try:
                _check_numel(reader, key, owners)
                reader.verify(key)
            except CheckpointError as error:
                owner = owners.get((path.name, key), (key, 0))[0]
                yield str(error) if owner == key else f"{error}; part of {owner}"
            if progress is not None:
                progress(entry.num_bytes)


def _check_numel(reader: Reader, key: str, owners: dict[tuple[str, str], tuple[str, int]]) -> None:
    """Raise if the manifest says that an entry of a file has more or fewer elements than it has."""
    found = reader.entries[key].numel
    _, expected = owners.get((reader.path.name, key), ("", found))
    if found != expected:
        raise CheckpointError(
            f"{reader.path}: tensor {show(key)}: holds {found} elements; the manifest says {expected}"
        )


def unreadable(source: Source, progress: Progress | None = None) -> Iterator[str]:
    """Read all tensors of a checkpoint that has no checksums; yield those that cannot be read."""
    for name in source.tensors:
        try:
            for _ in parts(source, name, progress):
                pass
        except CheckpointError as error:
            yield str(error)
