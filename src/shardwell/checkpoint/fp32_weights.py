"""The weights of a checkpoint of any kind as one state dictionary in fp32, also tensor by tensor, and as files of it.

The masters of a run are what it has trained; its 16-bit parameters are rounded copies of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from shardwell.checkpoint.contents import Contents
from shardwell.checkpoint.export import split_by_size
from shardwell.checkpoint.files import Entry, stream
from shardwell.checkpoint.parsing import failing
from shardwell.checkpoint.sources.base import MODEL, Source
from shardwell.checkpoint.sources.reading import Progress, read_full
from shardwell.errors import CheckpointError
from shardwell.sharding.layout import product

BIN, SAFE = "pytorch_model", "model"
_WEIGHTS = re.compile(r"(?:pytorch_model|model)(?:-\d+-of-\d+)?\.(?:bin|safetensors)(?:\.index\.json)?")


class StoredWeight:
    """A tensor that is read when it is asked for: its shape and dtype are known, `contiguous()` returns it."""

    def __init__(self, source: Source, name: str, dtype: torch.dtype) -> None:
        self.shape = torch.Size(source.tensors[MODEL + name].shape)
        self.dtype = dtype
        self._source, self._name = source, name

    def numel(self) -> int:
        return product(self.shape)

    def contiguous(self) -> Tensor:
        """Read the tensor."""
        return read_full(self._source, MODEL + self._name).to(self.dtype)

    def __repr__(self) -> str:
        return f"StoredWeight({self._name!r}, {tuple(self.shape)}, {self.dtype})"


def fp32_weights(
    source: Source, *, exclude_frozen: bool = False, dtype: torch.dtype | None = None
) -> dict[str, StoredWeight]:
    """Return the weights and buffers by name; another name of a shared parameter has the same object.

    Trained weights and floating buffers are in fp32 (those in fp64 stay so) and frozen ones in their stored dtype,
    unless all floating tensors shall have one `dtype`.
    """
    contents = Contents.of(source)
    names = [*contents.buffers, *(() if exclude_frozen else contents.frozen), *contents.trained]
    found = {}
    for name in names:
        stored = source.tensors[MODEL + name].dtype
        kind = stored
        if stored.is_floating_point and dtype is not None:
            kind = dtype
        elif stored.is_floating_point and stored.itemsize < 4 and name not in contents.frozen:
            kind = torch.float32
        found[name] = StoredWeight(source, name, kind)
    return found | {other: found[name] for other, name in contents.aliases.items() if name in found}


def write_weights(
    weights: Mapping[str, StoredWeight],
    out_dir: str | os.PathLike[str],
    *,
    max_file_bytes: int | None = None,
    as_safetensors: bool = False,
    progress: Progress | None = None,
) -> list[Path]:
    """Write weights as `pytorch_model.bin` or `model.safetensors`, or as numbered files with an index.

    A `.bin` file is what `torch.save` makes of a dictionary of tensors. The folder may exist and hold other files, but
    no weights of these kinds with other names: readers would not know which are meant.
    """
    path = Path(out_dir)
    first: dict[int, str] = {}
    aliases = {name: first[id(one)] for name, one in weights.items() if first.setdefault(id(one), name) != name}
    sizes = [(name, one.numel() * one.dtype.itemsize) for name, one in weights.items() if name not in aliases]
    total = sum(size for _, size in sizes)
    parts = split_by_size(sizes, max_file_bytes if max_file_bytes is not None else max(total, 1))
    stem, kind = (SAFE, "safetensors") if as_safetensors else (BIN, "bin")
    files = [f"{stem}.{kind}"]
    if len(parts) > 1:
        files = [f"{stem}-{number:05}-of-{len(parts):05}.{kind}" for number in range(1, len(parts) + 1)]
    index = f"{stem}.{kind}.index.json"
    _refuse_others(path, {*files, *([index] if len(parts) > 1 else [])})
    weight_map: dict[str, str] = {}
    for file, names in zip(files, parts, strict=True):
        others = {other: name for other, name in aliases.items() if name in names}
        chosen = {name: weights[name] for name in names}
        with _replacing(path / file) as partial:
            if as_safetensors:
                _write_safetensors(partial, chosen, others, progress)
            else:
                _write_bin(partial, chosen, others, progress)
        weight_map |= dict.fromkeys([*names, *(() if as_safetensors else others)], file)
    if len(parts) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        with _replacing(path / index) as partial:
            partial.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [path / file for file in files]


def _write_bin(
    path: Path, weights: Mapping[str, StoredWeight], others: Mapping[str, str], progress: Progress | None
) -> None:
    content: dict[str, Tensor] = {}
    for name, one in weights.items():
        content[name] = one.contiguous()
        if progress is not None:
            progress(content[name].nbytes)
    content |= {other: content[name] for other, name in others.items()}
    with path.open("xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _write_safetensors(
    path: Path, weights: Mapping[str, StoredWeight], others: Mapping[str, str], progress: Progress | None
) -> None:
    """Write each tensor once; the metadata names the other names of shared ones, as huggingface_hub does it."""

    def data(name: str) -> Iterator[Tensor]:
        tensor = weights[name].contiguous()
        if progress is not None:
            progress(tensor.nbytes)
        yield tensor.view(-1)

    entries = [Entry(name, one.dtype, tuple(one.shape)) for name, one in weights.items()]
    stream(path, entries, data, {"format": "pt", **others})


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield another name for a file, which becomes its own when it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with failing(f"{path}: cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        try:
            yield partial
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _refuse_others(path: Path, files: set[str]) -> None:
    if not path.exists():
        return
    with failing(f"{path}: cannot be read"):
        others = sorted(name for name in os.listdir(path) if _WEIGHTS.fullmatch(name) and name not in files)
    if others:
        raise CheckpointError(
            f"{path / others[0]}: weights of another conversion; remove them, or write to another folder"
        )
