"""Exports any source to the files of torch.distributed.checkpoint.

A plan lists the keys, and torch's own code writes the metadata. The tensors are written to one file, chunk by chunk:
torch's writer would hold all of them until the file is complete.

    model/<name>                     model.<name>, also under the other names of a shared parameter
    state/<name>/<key>               optim.state.<name>.<key>
    scalar/<name>/<key>              the same, as a tensor without dimensions
    the optimizer's param_groups     optim.param_groups.<i>.<key>
"""

from __future__ import annotations

import dataclasses
import io
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwell.checkpoint.parsing import failing
from shardwell.checkpoint.sources.base import MODEL, SCALAR, STATE, Source, StoredTensor
from shardwell.checkpoint.sources.reading import Progress, is_contiguous, read_full, weights
from shardwell.errors import CheckpointError
from shardwell.optim.odd_state import state_from_json
from shardwell.sharding.layout import product

CHUNK = 2**26  # bytes; larger tensors are cut
_FILE = "__0_0.distcp"
_Path = tuple[str | int, ...]  # the keys of a nested dictionary


def write(source: Source, path: Path, progress: Progress | None = None) -> None:
    """Write a source to an empty directory."""
    weights(source)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is not needed
        try:
            save({}, storage_writer=_Writer(path), planner=_Planner(source, progress), no_dist=True)
        except CheckpointException as error:  # which is no Exception
            first = next((cause for cause, _ in error.failures.values()), error)
            raise CheckpointError(str(first)) from error


class _Planner(SavePlanner):
    """A planner that knows all items, and reads each one only when it is written."""

    def __init__(self, source: Source, progress: Progress | None) -> None:
        self._items: list[WriteItem] = []
        self._paths: dict[str, _Path] = {}
        self._data: dict[MetadataIndex, Callable[[], Tensor | io.BytesIO]] = {}
        for name, path in _tensor_paths(source):
            self._add_tensor(source, name, path, progress)
        for name, value in source.values.items():
            if name.startswith(SCALAR):
                self._add_scalar(("optim", "state", *_split(name, SCALAR)), value)
        for index, group in enumerate(_groups(source)):
            for key, value in group.items():
                self._add(("optim", "param_groups", index, key), (), None, partial(_pickled, value))

    def _add(
        self,
        path: _Path,
        offsets: tuple[int, ...],
        data: TensorWriteData | None,
        read: Callable[[], Tensor | io.BytesIO],
    ) -> None:
        key = ".".join(map(str, path))
        if data is None:
            index, kind = MetadataIndex(key), WriteItemType.BYTE_IO
        else:
            index = MetadataIndex(key, offsets)
            kind = WriteItemType.TENSOR if data.chunk.sizes == data.size else WriteItemType.SHARD
        self._paths[key] = path
        self._items.append(WriteItem(index, kind, tensor_data=data))
        self._data[index] = read

    def _add_tensor(self, source: Source, name: str, path: _Path, progress: Progress | None) -> None:
        stored = source.tensors[name]
        row = product(stored.shape[1:])
        for offsets, sizes in _boxes(stored):
            first = offsets[0] * row if offsets else 0
            last = first + product(sizes)

            def read(first: int = first, last: int = last, sizes: tuple[int, ...] = sizes) -> Tensor:
                if not is_contiguous(stored):
                    return read_full(source, name, progress)
                part = source.read(name, first, last)
                if progress is not None:
                    progress(part.nbytes)
                return part.view(sizes)

            self._add(path, offsets, _write_data(offsets, sizes, stored.shape, stored.dtype), read)

    def _add_scalar(self, path: _Path, value: Any) -> None:
        if isinstance(value, dict):
            value = state_from_json(value, torch.device("cpu"), "/".join(map(str, path)))
        if isinstance(value, Tensor):
            shape = tuple(value.shape)
            self._add(path, (0,) * len(shape), _write_data((0,) * len(shape), shape, shape, value.dtype), lambda: value)
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self._add(path, (), None, partial(_pickled, value))
        else:  # as the optimizers of torch keep their step counts
            data = _write_data((), (), (), torch.float32)
            self._add(path, (), data, partial(torch.tensor, value, dtype=torch.float32))

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=self._paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._data[write_item.index]()


class _Writer(FileSystemWriter):
    """A writer that writes item by item to one file and keeps none in memory."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        path = Path(self.path) / _FILE
        with failing(f"{path}: cannot be written"), path.open("xb") as file:
            for item in plan.items:
                start = file.tell()
                data = planner.resolve_data(item)
                if isinstance(data, Tensor):
                    torch.save(data, file)
                else:
                    file.write(data.getbuffer())
                length = file.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(_FILE, start, length)))
            file.flush()
            os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def storage_meta(self) -> StorageMeta | None:
        return None  # it would name a directory that is about to be renamed


def _tensor_paths(source: Source) -> Iterator[tuple[str, _Path]]:
    for name in source.tensors:
        if name.startswith(MODEL):
            yield name, ("model", name.removeprefix(MODEL))
        elif name.startswith(STATE):
            yield name, ("optim", "state", *_split(name, STATE))
    for other, name in source.values.get("aliases", {}).items():
        if MODEL + name in source.tensors and MODEL + other not in source.tensors:
            yield MODEL + name, ("model", other)


def _split(name: str, prefix: str) -> tuple[str, str]:
    """Return the parameter and the key of `<prefix><parameter>/<key>`."""
    parameter, _, key = name.removeprefix(prefix).rpartition("/")
    return parameter, key


def _groups(source: Source) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: hyperparameters and, if known, names of parameters."""
    saved = source.values.get("param_groups") or (source.values.get("optimizer") or {}).get("param_groups") or []
    groups = [{key: tuple(value) if _is_numbers(value) else value for key, value in group.items()} for group in saved]
    if len(groups) == 1 and "params" not in groups[0]:
        states = [_split(name, STATE)[0] for name in source.tensors if name.startswith(STATE)]
        states += [_split(name, SCALAR)[0] for name in source.values if name.startswith(SCALAR)]
        groups[0]["params"] = list(dict.fromkeys(states))
    return groups


def _is_numbers(value: Any) -> bool:
    """Tell whether a list stands for a tuple, which JSON lacks, such as betas."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, (int, float)) for item in value)


def _boxes(stored: StoredTensor) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of the chunks of a tensor along its first dimension."""
    rest = stored.shape[1:]
    row = product(rest) * stored.dtype.itemsize
    if stored.numel * stored.dtype.itemsize <= CHUNK or not is_contiguous(stored):
        yield (0,) * len(stored.shape), stored.shape
        return
    step = max(CHUNK // row, 1)
    for first in range(0, stored.shape[0], step):
        yield (first, *(0 for _ in rest)), (min(step, stored.shape[0] - first), *rest)


def _write_data(
    offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> TensorWriteData:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    return TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))


def _pickled(value: Any) -> io.BytesIO:
    data = io.BytesIO()
    torch.save(value, data)
    return data
