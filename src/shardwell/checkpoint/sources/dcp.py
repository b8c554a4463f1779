"""A source that reads checkpoints of torch.distributed.checkpoint.

    .metadata           a pickle: the shape of each tensor, the boxes that it was cut into, and where each box lies
    __0_0.distcp        boxes, each written by `torch.save`, back to back; one file for each rank that saved

The pickle is read as data, with a list of the classes that may occur. Only the requested bytes of tensors are read.

    model.<name>                     model/<name>
    optim.state.<name>.<key>         state/<name>/<key>; scalar/<name>/<key> if it is a number
    optim.param_groups.<i>.<key>     param_groups[i][key] in `values`

A bare state dict, without `model`, is a model. Other entries are not read; `ignored` names them.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwell.checkpoint.manifest import plain_name
from shardwell.checkpoint.parsing import failing, is_size, open_plain, parse_shape, show
from shardwell.checkpoint.sources import pickles
from shardwell.checkpoint.sources.archive import KNOWN_DTYPES, ArchiveFile, SavedStorage, load_value, locate
from shardwell.checkpoint.sources.base import MODEL, SCALAR, STATE, StoredTensor
from shardwell.checkpoint.sources.pickles import Record, member, nothing, ordered
from shardwell.errors import CheckpointError
from shardwell.sharding.layout import contiguous_stride, product

METADATA = ".metadata"
_MAX_METADATA = 2**28  # bytes
_OPTIMIZERS = ("optim", "optimizer")


@dataclass(frozen=True)
class _Bytes:
    """A range of bytes in a file."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class _Box:
    """A box of a tensor: offsets, sizes, and its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: _Bytes

    @property
    def numel(self) -> int:
        return product(self.sizes)


@dataclass(frozen=True)
class _BoxedTensor:
    """A tensor and its boxes. `starts` are their first elements, if each box is contiguous in the flat tensor."""

    stored: StoredTensor
    boxes: tuple[_Box, ...]
    starts: tuple[int, ...] | None


class DcpSource:
    """A directory that torch.distributed.checkpoint wrote."""

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.where = str(path)
        self.bytes_read = 0
        self._root = Path(path)
        self._files: dict[str, ArchiveFile] = {}
        self._saved: dict[_Bytes, SavedStorage] = {}
        self._lock = threading.Lock()
        self._metadata = _Metadata(self._root)
        self._boxed: dict[str, _BoxedTensor] = {}
        values: dict[str, Any] = {}
        try:
            self.ignored = self._sort(_sections(self._metadata), values)
        except BaseException:
            self.close()
            raise
        self.tensors = {name: boxed.stored for name, boxed in self._boxed.items()}
        self.values = values

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._boxed:
            raise CheckpointError(f"{self.where}: tensor {name!r}: not in this checkpoint")
        boxed = self._boxed[name]
        if not 0 <= start <= stop <= boxed.stored.numel:
            raise CheckpointError(
                f"{self.where}: tensor {name!r}: has {boxed.stored.numel} elements, asked for {start} to {stop}"
            )
        if start == stop:
            return torch.empty(0, dtype=boxed.stored.dtype, device="cpu")
        read = self._rows if boxed.starts is None else self._ranges
        return read(name, boxed, start, stop)

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    # --- tensors ------------------------------------------------------------------------------------------------

    def _ranges(self, name: str, boxed: _BoxedTensor, start: int, stop: int) -> Tensor:
        assert boxed.starts is not None
        parts = []
        index = bisect_right(boxed.starts, start) - 1
        while start < stop:
            box, first = boxed.boxes[index], boxed.starts[index]
            last = min(stop, first + box.numel)
            parts.append(self._take(name, boxed, box, start - first, last - first))
            start, index = last, index + 1
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _rows(self, name: str, boxed: _BoxedTensor, start: int, stop: int) -> Tensor:
        """Assemble the rows (of the first dimension) that hold the elements from all boxes that overlap them."""
        shape = boxed.stored.shape
        row = product(shape[1:])
        low, high = start // row, -(-stop // row)
        full = torch.empty((high - low, *shape[1:]), dtype=boxed.stored.dtype, device="cpu")
        filled = torch.zeros(full.shape, dtype=torch.bool, device="cpu")
        for box in boxed.boxes:
            top = box.offsets[0]
            first, last = max(low, top), min(high, top + box.sizes[0])
            if first >= last:
                continue
            width = product(box.sizes[1:])
            part = self._take(name, boxed, box, (first - top) * width, (last - top) * width)
            rest = [slice(at, at + size) for at, size in zip(box.offsets[1:], box.sizes[1:], strict=True)]
            region = (slice(first - low, last - low), *rest)
            full[region] = part.view(last - first, *box.sizes[1:])
            filled[region] = True
        if not bool(filled.all()):
            raise CheckpointError(f"{self.where}: tensor {name!r}: some of its elements were not saved")
        return full.view(-1)[start - low * row : stop - low * row]

    def _take(self, name: str, boxed: _BoxedTensor, box: _Box, first: int, last: int) -> Tensor:
        file = self._file(box.place.file)
        saved = self._saved.get(box.place)
        if saved is None:
            where = f"{file.path}: tensor {name!r}"
            saved = locate(file, box.place.offset, box.place.length, where)
            if saved.shape != box.sizes or saved.dtype != boxed.stored.dtype:
                raise CheckpointError(
                    f"{where}: expected {boxed.stored.dtype} {show(box.sizes)}, found {saved.dtype} {show(saved.shape)}"
                )
            self._saved[box.place] = saved
        part = saved.read(file, first, last)
        self.bytes_read += part.nbytes
        return part

    def _file(self, name: str) -> ArchiveFile:
        with self._lock:
            if name not in self._files:
                self._files[name] = ArchiveFile(self._root / name)
            return self._files[name]

    # --- names --------------------------------------------------------------------------------------------------

    def _sort(self, sections: dict[str, tuple[str, str]], values: dict[str, Any]) -> list[str]:
        """Map all saved keys to the names of a `Source`; return those that have none."""
        boxed = self._metadata.tensors
        for key, (section, rest) in sections.items():
            if section == "model" and key in boxed:
                self._boxed[MODEL + rest] = boxed[key]
        groups: dict[int, dict[str, Any]] = {}
        ignored = []
        for key, (section, rest) in sections.items():
            if section in _OPTIMIZERS and rest.startswith("state."):
                self._add_state(key, rest.removeprefix("state."), values)
            elif section in _OPTIMIZERS and rest.startswith("param_groups."):
                index, _, field = rest.removeprefix("param_groups.").partition(".")
                if not index.isdecimal() or len(index) > 6 or not self._add_field(key, field, groups, int(index)):
                    ignored.append(key)
            elif section != "model" or key not in boxed:
                ignored.append(key)
        if groups:
            values["param_groups"] = [groups[index] for index in sorted(groups)]
        return ignored

    def _add_state(self, key: str, rest: str, values: dict[str, Any]) -> None:
        name = self._owner(rest)
        if name is None:
            raise CheckpointError(f"{self.where}: {key!r}: the state of no tensor of the model")
        field = rest[len(name) + 1 :]
        boxed = self._metadata.tensors.get(key)
        if boxed is None:
            values[f"{SCALAR}{name}/{field}"] = self._object(key)
        elif boxed.stored.shape == () and (self._boxed[MODEL + name].stored.shape != () or field == "step"):
            values[f"{SCALAR}{name}/{field}"] = self._take(key, boxed, boxed.boxes[0], 0, 1).item()
        else:
            self._boxed[f"{STATE}{name}/{field}"] = boxed

    def _owner(self, rest: str) -> str | None:
        """Return the model's tensor that `<name>.<key>` is a state of. Both may contain dots; the longest name wins."""
        name = rest
        while "." in name:
            name = name.rpartition(".")[0]
            if MODEL + name in self._boxed:
                return name
        return None

    def _add_field(self, key: str, field: str, groups: dict[int, dict[str, Any]], index: int) -> bool:
        """Add a hyperparameter, if JSON can hold it."""
        boxed = self._metadata.tensors.get(key)
        try:
            if boxed is None:
                value = self._object(key)
            elif boxed.stored.shape == ():
                value = self._take(key, boxed, boxed.boxes[0], 0, 1).item()
            else:
                return False
        except CheckpointError:
            return False
        groups.setdefault(index, {})[field] = list(value) if isinstance(value, tuple) else value
        return True

    def _object(self, key: str) -> Any:
        """Return the value of a key that is not a tensor: a number, a string, or a list of them."""
        place = self._metadata.objects[key]
        where = f"{self._root / place.file}: {key!r}"
        value = load_value(self._file(place.file), place.offset, place.length, where)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if item is not None and not isinstance(item, (bool, int, float, str)):
                raise CheckpointError(f"{where}: expected plain values, found {show(item)}")
        return value


# --- the metadata -----------------------------------------------------------------------------------------------


def _size(*args: Any) -> tuple[int, ...]:
    """Replace torch.Size when the pickle is read."""
    return parse_shape(list(args[0]) if args else [], METADATA)


_CLASSES = (
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",  # before torch 2.3
    "torch.distributed.checkpoint.filesystem._StorageInfo",
)
_UNUSED = (
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",  # before torch 2.3
    "torch.serialization._get_layout",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.Path",  # Python 3.13
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
)


class _TensorRecord(Record):
    pass


class _ObjectRecord(Record):
    pass


_KNOWN: dict[str, Any] = {
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata": _TensorRecord,
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata": _ObjectRecord,
    "torch.Size": _size,
    "collections.OrderedDict": ordered,
    "builtins.getattr": member,
    **dict.fromkeys(_CLASSES, Record),
    **dict.fromkeys(_UNUSED, nothing),
    **KNOWN_DTYPES,
}


class _Metadata:
    """The content of the metadata file, checked against the existing files."""

    def __init__(self, root: Path) -> None:
        self._root, self._where = root, str(root / METADATA)
        content = pickles.load(_read(root / METADATA), _KNOWN, self._where)
        if not isinstance(content, Record):
            raise CheckpointError(f"{self._where}: expected Metadata, found {show(content)}")
        self.paths = content.get("planner_data")
        self._sizes: dict[str, int] = {}
        places = self._places(content.get("storage_data"))
        self.tensors: dict[str, _BoxedTensor] = {}
        self.objects: dict[str, _Bytes] = {}
        for key, record in _mapping(content.get("state_dict_metadata"), f"{self._where}: state_dict_metadata").items():
            where = f"{self._where}: {show(key)}"
            if not isinstance(key, str):
                raise CheckpointError(f"{where}: expected a name")
            if isinstance(record, _TensorRecord):
                self.tensors[key] = _boxed_tensor(key, record, places, where)
            elif isinstance(record, _ObjectRecord):
                if (key, None) not in places:
                    raise CheckpointError(f"{where}: saved in no file")
                self.objects[key] = places[key, None]
            else:
                raise CheckpointError(f"{where}: expected the metadata of a tensor or of an object")

    def _places(self, raw: Any) -> dict[tuple[str, tuple[int, ...] | None], _Bytes]:
        """Return the file range of each box, by the name of its tensor and its offsets."""
        places = {}
        for index, info in _mapping(raw, f"{self._where}: storage_data").items():
            if not isinstance(index, Record) or not isinstance(info, Record):
                raise CheckpointError(f"{self._where}: storage_data: expected places by index")
            key, offsets = index.get("fqn"), index.get("offset")
            where = f"{self._where}: {show(key)}"
            if not isinstance(key, str) or not (offsets is None or _is_offsets(offsets)):
                raise CheckpointError(f"{where}: expected a name and offsets, found {show(offsets)}")
            if info.get("transform_descriptors"):
                raise CheckpointError(f"{where}: was written through an extension of torch's; save it without")
            place = _Bytes(info.get("relative_path"), info.get("offset"), info.get("length"))
            self._check(place, where)
            places[key, offsets] = place
        return places

    def _check(self, place: _Bytes, where: str) -> None:
        if not plain_name(place.file) or not is_size(place.offset) or not is_size(place.length):
            raise CheckpointError(f"{where}: expected the plain name of a file and two sizes, found {show(place.file)}")
        if place.file not in self._sizes:
            path = self._root / place.file
            if not os.path.lexists(path):
                raise CheckpointError(f"{path}: missing; {where} is in it")
            file, self._sizes[place.file] = open_plain(path)
            file.close()
        if place.offset + place.length > self._sizes[place.file]:
            raise CheckpointError(
                f"{self._root / place.file}: truncated: {self._sizes[place.file]} bytes, but {where} ends at byte "
                f"{place.offset + place.length}"
            )


def _read(path: Path) -> bytes:
    file, size = open_plain(path)
    with file, failing(f"{path}: cannot be read"):
        if size > _MAX_METADATA:
            raise CheckpointError(f"{path}: {size} bytes; expected at most {_MAX_METADATA}")
        return file.readall()


def _mapping(raw: Any, where: str) -> dict[Any, Any]:
    if not isinstance(raw, dict):
        raise CheckpointError(f"{where}: expected a dictionary, found {show(raw)}")
    return raw


def _boxed_tensor(key: str, record: Record, places: Mapping[Any, _Bytes], where: str) -> _BoxedTensor:
    properties = record.get("properties")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    shape, chunks = record.get("size"), record.get("chunks")
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, tuple) or not isinstance(chunks, list):
        raise CheckpointError(f"{where}: expected a dtype, a size and a list of chunks")
    shape = parse_shape(list(shape), where)
    boxes = []
    for chunk in chunks:
        if not isinstance(chunk, Record):
            raise CheckpointError(f"{where}: expected a chunk, found {show(chunk)}")
        offsets, sizes = chunk.get("offsets"), chunk.get("sizes")
        if not _inside(offsets, sizes, shape):
            raise CheckpointError(f"{where}: {show(shape)}: a chunk of {show(sizes)} at {show(offsets)} is outside")
        if 0 in sizes:
            continue
        place = places.get((key, offsets))
        if place is None or product(sizes) * dtype.itemsize > place.length:
            raise CheckpointError(f"{where}: the chunk at {show(offsets)} is in no file, or larger than its bytes")
        boxes.append(_Box(offsets, sizes, place))
    if sum(box.numel for box in boxes) != product(shape):
        raise CheckpointError(f"{where}: {show(shape)}: the chunks hold more or fewer elements than the tensor")
    return _tiled(StoredTensor(dtype, shape), boxes, where)


def _is_offsets(raw: Any) -> bool:
    return isinstance(raw, tuple) and all(is_size(value) for value in raw)


def _inside(offsets: Any, sizes: Any, shape: tuple[int, ...]) -> bool:
    return (
        isinstance(offsets, tuple)
        and isinstance(sizes, tuple)
        and len(offsets) == len(sizes) == len(shape)
        and all(is_size(value) for value in (*offsets, *sizes))
        and all(at + size <= full for at, size, full in zip(offsets, sizes, shape, strict=True))
    )


def _tiled(stored: StoredTensor, boxes: list[_Box], where: str) -> _BoxedTensor:
    """Return the boxes in order, if each of them is contiguous in the flat tensor."""
    strides = contiguous_stride(stored.shape)
    starts: list[int] = []
    for box in sorted(boxes, key=lambda box: box.offsets):
        outer = 0
        while outer < len(box.sizes) and box.sizes[outer] == 1:
            outer += 1
        if box.sizes[outer + 1 :] != stored.shape[outer + 1 :]:
            return _BoxedTensor(stored, tuple(boxes), None)
        starts.append(sum(at * step for at, step in zip(box.offsets, strides, strict=True)))
    ordered = tuple(sorted(boxes, key=lambda box: box.offsets))
    reached = 0
    for box, start in zip(ordered, starts, strict=True):
        if start != reached:
            raise CheckpointError(f"{where}: elements {reached} to {start} are in no chunk, or in two")
        reached += box.numel
    return _BoxedTensor(stored, ordered, tuple(starts))


def _sections(metadata: _Metadata) -> dict[str, tuple[str, str]]:
    """Return, for each key, its part of the training state ("model", "optim") and its name there.

    The metadata says how a nested dictionary was joined to keys. If it does not, a first word that is the name of a
    part counts as one, provided that all tensors have such a word: Llama's own names begin with `model.`, too.
    """
    keys = [*metadata.tensors, *metadata.objects]
    paths = {key: _path(key, metadata.paths) for key in keys}
    wrapped = {path[0] for path in paths.values()}
    if len(wrapped) == 1 and any(len(path) > 2 and path[1] == "model" for path in paths.values()):
        paths = {key: path[1:] for key, path in paths.items()}  # {"app": {"model": ..., "optim": ...}}
    if not isinstance(metadata.paths, dict) and all(_first(key) in ("model", *_OPTIMIZERS) for key in metadata.tensors):
        paths = {key: (_first(key), key.partition(".")[2]) for key in keys}
    parts = {key: (path[0], ".".join(path[1:])) for key, path in paths.items() if len(path) > 1}
    if any(part == "model" and key in metadata.tensors for key, (part, _) in parts.items()):
        return {key: parts.get(key, ("", key)) for key in keys}
    optimizer = {key: part for key, part in parts.items() if part[0] in _OPTIMIZERS}
    return {key: optimizer.get(key, ("model", key)) for key in keys}


def _path(key: str, paths: Any) -> tuple[str, ...]:
    path = paths.get(key) if isinstance(paths, dict) else None
    if not isinstance(path, tuple) or not path or not all(isinstance(part, (str, int)) for part in path):
        return (key,)
    return tuple(map(str, path)) if ".".join(map(str, path)) == key else (key,)


def _first(key: str) -> str:
    return key.partition(".")[0]
