"""Exports any source to a file format. Tensors are read in parts, so that only a part is in memory.

A tensor that is not stored contiguously is reordered in memory, in full.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwell.checkpoint import directory
from shardwell.checkpoint.adapters import CONFIG as ADAPTER_CONFIG
from shardwell.checkpoint.adapters import WEIGHTS, adapters_of, files_of, merge
from shardwell.checkpoint.contents import names_in
from shardwell.checkpoint.files import Entry, stream
from shardwell.checkpoint.folder import Folder
from shardwell.checkpoint.manifest import Manifest
from shardwell.checkpoint.parsing import failing
from shardwell.checkpoint.pieces import FilePiece, TensorRecord
from shardwell.checkpoint.quantized_weights import QuantizedSource, Quantizer
from shardwell.checkpoint.sources.base import MODEL, STATE, Source, StoredTensor
from shardwell.checkpoint.sources.reading import Progress, in_order, parts, weights
from shardwell.checkpoint.sources.safetensors import CONFIG, INDEX, SINGLE
from shardwell.errors import CheckpointError

_PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.partial", re.DOTALL)
MAX_FILE = 5_000_000_000  # bytes
GENERATION = "generation_config.json"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
)


def to_safetensors(
    source: Source,
    out_dir: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE,
    progress: Progress | None = None,
    *,
    merges: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a directory that `from_pretrained` reads: weights, index and, if known, configurations and tokenizer.

    Floating tensors are cast to `dtype`. A tensor that has several names is written once. Adapters are written as peft
    reads them, without their base model; with `merges`, they are merged into its weights. Files of the tokenizer come
    from the folder `tokenizer`, or from the folder that the model came from, if it is on this machine.
    """
    adapters = adapters_of(source)
    if adapters is not None and not merges:
        return _to_adapters(source, adapters, out_dir, dtype, progress, tokenizer)
    if merges:
        source, progress = merge(source, progress), None
    names = weights(source)
    _warn_if_part(source)
    entries = {name: _entry(name.removeprefix(MODEL), source.tensors[name], dtype) for name in names}
    batches = split_by_size([(name, entry.num_bytes) for name, entry in entries.items()], max_file_bytes)
    with _new_directory(out_dir) as path:
        weight_map = {}
        for number, batch in enumerate(batches, start=1):
            file = SINGLE if len(batches) == 1 else f"model-{number:05}-of-{len(batches):05}.safetensors"

            def data(key: str) -> Iterator[Tensor]:
                return (_cast(part, dtype, key) for part in in_order(source, MODEL + key, progress))

            stream(path / file, [entries[name] for name in batch], data, {"format": "pt"})
            weight_map.update({entries[name].name: file for name in batch})
        if len(batches) > 1:
            total = sum(entry.num_bytes for entry in entries.values())
            _write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        if source.values.get("model_config"):
            _write_json(path / CONFIG, _config(source.values["model_config"], dtype))
        if source.values.get("generation_config"):
            _write_json(path / GENERATION, source.values["generation_config"])
        _copy_tokenizer(source, tokenizer, path)
    return Path(out_dir)


def to_quantized(
    source: Source,
    out_dir: str | os.PathLike[str],
    kind: Quantizer,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE,
    progress: Progress | None = None,
    *,
    merges: bool = False,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the same as `to_safetensors`, with the weights of linear layers in int8 or fp8 (`quantized_weights.py`).

    `from_pretrained` and servers need the package compressed-tensors to load it.
    """
    if adapters_of(source) is not None and not merges:
        raise CheckpointError(f"{source.where}: holds adapters of peft; quantise them with --merge, into their base")
    if merges:
        source, progress = merge(source, progress), None
    return to_safetensors(
        QuantizedSource(source, kind, dtype), out_dir, None, max_file_bytes, progress, tokenizer=tokenizer
    )


def _to_adapters(
    source: Source,
    adapters: Mapping[str, Any],
    out_dir: str | os.PathLike[str],
    dtype: torch.dtype | None,
    progress: Progress | None,
    tokenizer: str | os.PathLike[str] | None,
) -> Path:
    """Write a directory that `PeftModel.from_pretrained` reads."""
    with _new_directory(out_dir) as path:
        for folder, names, config in files_of(source, adapters):
            (path / folder).mkdir(exist_ok=True)

            def data(key: str, names: dict[str, str] = names) -> Iterator[Tensor]:
                return (_cast(part, dtype, key) for part in in_order(source, names[key], progress))

            entries = [_entry(key, source.tensors[name], dtype) for key, name in names.items()]
            stream(path / folder / WEIGHTS, entries, data, {"format": "pt"})
            _write_json(path / folder / ADAPTER_CONFIG, config)
        _copy_tokenizer(source, tokenizer, path)
    return Path(out_dir)


def _copy_tokenizer(source: Source, given: str | os.PathLike[str] | None, path: Path) -> None:
    """Copy the files of a tokenizer, if a folder with some is known."""
    folder = given if given is not None else source.values.get("name_or_path")
    found = [name for name in TOKENIZER if folder is not None and os.path.isfile(os.path.join(folder, name))]
    if given is not None and not found:
        raise CheckpointError(f"{given}: no tokenizer there; looked for {', '.join(TOKENIZER[:4])} and others")
    for name in found:
        with failing(f"{path / name}: cannot be written"):
            shutil.copyfile(os.path.join(str(folder), name), path / name)


def to_own(
    source: Source,
    root: str | os.PathLike[str],
    tag: str,
    max_file_bytes: int = MAX_FILE,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint in shardwell's own format, with all tensors and values, as the latest of its folder."""
    folder = Folder(root)
    if folder.is_committed(tag):
        raise CheckpointError(f"{folder.root / tag}: exists; remove it, or use another tag")
    sizes = [(name, stored.numel * stored.dtype.itemsize) for name, stored in source.tensors.items()]
    batches = split_by_size(sizes, max_file_bytes)
    path = folder.begin(tag)
    with contextlib.suppress(CheckpointError):  # old temporary directories must not stop an export
        folder.clean()
    try:
        files, tensors = {}, {}
        for number, batch in enumerate(batches):
            file = f"{number:05}.safetensors"
            entries = [Entry(name, source.tensors[name].dtype, source.tensors[name].shape) for name in batch]
            files[file] = stream(path / file, entries, lambda name: parts(source, name, progress))
            tensors.update({name: _record(name, source, file) for name in batch})
        return folder.commit(path, tag, Manifest(tensors, files, dict(source.values)))
    except BaseException:
        with contextlib.suppress(CheckpointError):
            folder.discard(path)
        raise


def to_dcp(source: Source, out_dir: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """Write a directory that `torch.distributed.checkpoint.load` reads into {"model": ..., "optim": ...}."""
    from shardwell.checkpoint import export_dcp  # which loads much of torch

    with _new_directory(out_dir) as path:
        export_dcp.write(source, path, progress)
    return Path(out_dir)


def to_deepspeed(
    source: Source,
    out_dir: str | os.PathLike[str],
    ranks: int | None = None,
    stage: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a folder as an engine of DeepSpeed would, at a stage (1 to 3) and a number of ranks; by default the run's.

    Its files are pickles by nature: they are made by `torch.save` of plain values and tensors.
    """
    from shardwell.checkpoint import export_deepspeed

    with _new_directory(out_dir) as path:
        export_deepspeed.write(source, path, ranks, stage, progress)
    return Path(out_dir)


def to_universal(source: Source, out_dir: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """Write a checkpoint in DeepSpeed's universal format, and its name to `latest_universal` beside it."""
    from shardwell.checkpoint import export_universal

    with _new_directory(out_dir) as path:
        export_universal.write(source, path, progress)
    export_universal.name_latest(Path(os.path.abspath(out_dir)))
    return Path(out_dir)


@contextlib.contextmanager
def _new_directory(out_dir: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new directory that is renamed to `out_dir` on success, and removed on failure."""
    target = Path(os.path.abspath(out_dir))
    if os.path.lexists(target) and not (target.is_dir() and not target.is_symlink() and not any(target.iterdir())):
        raise CheckpointError(f"{out_dir}: exists; move it, or write to another place")
    path = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    with failing(f"{out_dir}: cannot be made"):
        os.makedirs(path)
        lock = directory.lock(path)
    _remove_leftovers(target.parent)
    try:
        yield path
        with failing(f"{out_dir}: cannot be put in its place"):
            os.unlink(path / directory.LOCK)
            directory.sync(path)
            os.rename(path, target)
            directory.sync(target.parent)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        directory.close(lock)


def _remove_leftovers(parent: Path) -> None:
    """Remove the directories of exports that were killed: they have a lock file that no process has locked."""
    try:
        names = os.listdir(parent)
    except OSError:
        return
    for path in [parent / name for name in names if _PARTIAL.fullmatch(name)]:
        with contextlib.suppress(CheckpointError, OSError):  # the export is complete without it
            if directory.is_abandoned(path, marked=True):
                shutil.rmtree(path)


def _write_json(path: Path, content: Any) -> None:
    with failing(f"{path}: cannot be written"), path.open("x", encoding="utf-8") as file:
        json.dump(content, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def split_by_size(sizes: Sequence[tuple[str, int]], limit: int) -> list[list[str]]:
    """Return the names in order, in batches that each fit into one file."""
    if limit < 1:
        raise CheckpointError(f"the largest size of a file: expected at least 1 byte, found {limit}")
    batches: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes:
        if batches[-1] and filled + size > limit:
            batches.append([])
            filled = 0
        batches[-1].append(name)
        filled += size
    return batches


def _entry(name: str, stored: StoredTensor, dtype: torch.dtype | None) -> Entry:
    changes = dtype is not None and stored.dtype.is_floating_point
    return Entry(name, dtype if dtype is not None and changes else stored.dtype, stored.shape)


def _cast(part: Tensor, dtype: torch.dtype | None, name: str) -> Tensor:
    if dtype is None or not part.is_floating_point() or part.dtype == dtype:
        return part
    cast = part.to(dtype)
    infinite = cast.isinf()
    if bool(infinite.any()) and bool((infinite & part.isfinite()).any()):
        warnings.warn(f"tensor {name!r}: some values are too large for {dtype} and became infinite", stacklevel=2)
    return cast


def _config(config: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Return a model's configuration with the dtype of the exported weights."""
    if dtype is None:
        return dict(config)
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    return {**config, **dict.fromkeys(keys, str(dtype).removeprefix("torch."))}


def _record(name: str, source: Source, file: str) -> TensorRecord:
    stored = source.tensors[name]
    kind = f"state:{name.rpartition('/')[2]}" if name.startswith(STATE) else "parameter"
    if name.startswith(MODEL) and name.removeprefix(MODEL) in (names_in(source.values, "buffers") or ()):
        kind = "buffer"
    pieces = (FilePiece(file, name, 0, stored.numel),) if stored.numel else ()
    return TensorRecord(stored.dtype, stored.shape, tuple(stored.order), kind, pieces)


def _warn_if_part(source: Source) -> None:
    if source.values.get("frozen_excluded"):
        warnings.warn(f"{source.where}: was saved without its frozen weights, so the export lacks them", stacklevel=3)
