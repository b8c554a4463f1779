"""Small checkpoints in a folder, each of them a number."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from shardwell.checkpoint import FilePiece, Folder, Manifest, TensorRecord, write
from tests.support.internals import locks_of

FILES = ("r0.safetensors", "r1.safetensors")


def fill(path: Path, number: int, step: int | None = None) -> Manifest:
    """Two files that hold halves of a tensor whose elements are all `number`."""
    files = {name: write(path / name, {"w": torch.full((3,), float(number))}) for name in FILES}
    pieces = tuple(FilePiece(name, "w", 3 * index, 3) for index, name in enumerate(FILES))
    values = {"number": number, **({} if step is None else {"counters": {"global_steps": step}})}
    return Manifest({"w": TensorRecord(torch.float32, (6,), (1,), "parameter", pieces)}, files, values)


def save(folder: Folder, tag: str, number: int, step: int | None = None) -> None:
    path = folder.begin(tag)
    folder.commit(path, tag, fill(path, number, step))


def load(folder: Folder, tag: str | None = None) -> int:
    """The number that was saved, once every file says the same."""
    tag = tag or folder.latest()
    assert tag is not None
    manifest = folder.open(tag)
    number: int = manifest.values["number"]
    for piece in manifest.tensors["w"].pieces:
        with folder.reader(tag, piece.file, manifest) as reader:
            assert torch.equal(reader.read(piece.key), torch.full((3,), float(number)))
    return number


def lay_aside(folder: Folder, tag: str, numbers: list[int]) -> list[str]:
    """Checkpoints of one tag, the oldest first, as crashes between the renames of commits leave them."""
    names = [f".{tag}.{'f0'[index % 2]}{index:015x}.aside" for index in range(len(numbers))]
    for number, name in zip(numbers, names, strict=True):
        save(folder, tag, number)
        (folder.root / tag).rename(folder.root / name[1:])
    for name in names:
        (folder.root / name[1:]).rename(folder.root / name)
    return names


def hidden(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith(".")]


def abandon(folder: Folder) -> None:
    """What the end of a process does to its locks."""
    for descriptor in locks_of(folder).values():
        os.close(descriptor)
    locks_of(folder).clear()
