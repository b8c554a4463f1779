"""Rows of a batch from documents: a flat array of tokens on disk, and the range of it that each row is.

Tokens are written once, by rank 0, and mapped by all ranks. A row is a range of consecutive documents, or of text that
may be cut. Each document in a row has positions of its own from 0 on, by which attention tells them apart, and the
first token of a document is no label: nothing before it belongs to it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardwell.errors import ShardwellError
from shardwell.long_work import LongWork
from shardwell.train.documents import Document, document, files_of, records_of

IGNORED = -100  # the label of a token that is not trained on, as Transformers has it
_ARRAYS = ("tokens", "trained", "starts", "rows")


def pack(documents: Iterable[Document], length: int, *, packing: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of rows of at most `length` tokens.

    Text is cut where a row ends, and goes on in the next. Other documents stay in one row; what is longer is cut off.
    Without packing every document, or piece of text, begins a row.
    """
    tokens: list[int] = []
    trained: list[bool] = []
    starts: list[int] = []
    rows: list[tuple[int, int]] = []
    begin = 0  # of the row that is being filled
    for one in documents:
        pieces = len(one.tokens) if one.is_text else min(len(one.tokens), length)
        fits = len(tokens) - begin + pieces <= length
        if len(tokens) > begin and (not packing or not (fits or one.is_text)):
            rows.append((begin, len(tokens)))
            begin = len(tokens)
        starts.append(len(tokens))
        tokens += one.tokens[:pieces]
        trained += one.is_trained[:pieces]
        while len(tokens) - begin >= length:
            rows.append((begin, begin + length))
            begin += length
    if len(tokens) > begin:
        rows.append((begin, len(tokens)))
    learn = [(first, last) for first, last in rows if any(trained[first + 1 : last])]
    return {
        "tokens": np.asarray(tokens, dtype=np.int32),
        "trained": np.asarray(trained, dtype=np.bool_),
        "starts": np.asarray(starts, dtype=np.int64),
        "rows": np.asarray(learn, dtype=np.int64).reshape(-1, 2),
    }


class Rows(Dataset[dict[str, Tensor]]):
    """Rows as a model takes them: input_ids, position_ids and labels, all of one length."""

    def __init__(self, arrays: dict[str, np.ndarray[Any, Any]], length: int, pad: int) -> None:
        self._tokens, self._trained, self._starts, self._rows = (arrays[name] for name in _ARRAYS)
        self._length, self._pad = length, pad

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self._check_files()
        begin, end = (int(place) for place in self._rows[index])
        used = end - begin
        tokens = np.full(self._length, self._pad, dtype=np.int64)
        labels = np.full(self._length, IGNORED, dtype=np.int64)
        positions = np.arange(self._length, dtype=np.int64)
        tokens[:used] = self._tokens[begin:end]
        labels[:used] = np.where(self._trained[begin:end], tokens[:used], IGNORED)
        first, last = np.searchsorted(self._starts, (begin, end))
        for place in [*(self._starts[first:last] - begin), used]:  # padding is a document of its own
            positions[place:] = np.arange(self._length - place)
            labels[place : place + 1] = IGNORED
        return {
            "input_ids": torch.from_numpy(tokens),
            "position_ids": torch.from_numpy(positions),
            "labels": torch.from_numpy(labels),
        }

    def _check_files(self) -> None:
        """Raise if a file became shorter since it was mapped: a process that reads behind its end is killed."""
        for one in (self._tokens, self._trained, self._starts, self._rows):
            if isinstance(one, np.memmap) and os.stat(str(one.filename)).st_size < one.offset + one.nbytes:
                raise ShardwellError(
                    f"{one.filename} became shorter while it was read; delete its folder, and run again"
                )


def prepare(
    paths: list[str], tokenizer: Any, folder: Path, length: int, *, packing: bool, text_field: str, writes: bool
) -> Path:
    """Return the folder of the arrays of some files; with `writes`, make it if it is not there yet."""
    files = files_of(paths)
    key = [*((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files)]
    options = [length, packing, text_field, tokenizer.vocab_size, getattr(tokenizer, "chat_template", None)]
    name = hashlib.sha256(json.dumps([key, options, str(tokenizer.name_or_path)]).encode()).hexdigest()[:16]
    place = folder / f"rows-{name}"
    if not writes or place.is_dir():
        return place
    counted = LongWork("documents tokenised", speaks=True)

    def documents() -> Iterator[Document]:
        for file in files:
            for where, one in records_of(file):
                yield document(one, tokenizer, where, text_field)
                counted.add()

    arrays = pack(documents(), length, packing=packing)
    if not len(arrays["rows"]):
        raise ShardwellError(f"there is nothing to train on in {', '.join(paths)}: no document has two tokens")
    partial = folder / f"rows-{name}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    for array, content in arrays.items():
        with (partial / f"{array}.npy").open("wb") as file:
            np.save(file, content, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())  # a name of the folder without its content would be damage
    os.replace(partial, place)  # completely or not at all
    return place


def opened(place: Path, length: int, pad: int) -> Rows:
    """Return the rows of a folder, mapped into memory."""
    try:
        arrays = {name: np.load(place / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS}
        fits = _fit(arrays, length)
    except (OSError, ValueError, EOFError):
        fits = False
    if not fits:
        raise ShardwellError(f"{place}: the tokens of an earlier run there are damaged; delete this folder")
    return Rows(arrays, length, pad)


def _fit(arrays: dict[str, np.ndarray[Any, Any]], length: int) -> bool:
    """Return whether arrays have the form that `pack` gives them, and rows lie inside of the tokens."""
    tokens, trained, starts, rows = (arrays[name] for name in _ARRAYS)
    kinds = [(one.dtype, one.ndim) for one in (tokens, trained, starts, rows)]
    if kinds != [(np.int32, 1), (np.bool_, 1), (np.int64, 1), (np.int64, 2)] or rows.shape[1] != 2 or not len(rows):
        return False
    sizes = rows[:, 1] - rows[:, 0]
    is_inside = rows.min() >= 0 and rows.max() <= len(tokens) and sizes.min() > 0 and sizes.max() <= length
    return bool(is_inside and len(trained) == len(tokens) and (np.diff(starts) >= 0).all())
