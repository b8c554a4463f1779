"""What is not a tensor of the model, as JSON: counters, schedules, random states, whatever the user adds.

JSON knows no tuples, no numbers as keys, no NaN and no tensors. These become objects with one key that starts with a
dollar sign; tensors go into the files and are named. Everything else that JSON cannot hold is refused: nothing is
pickled.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwell.errors import CheckpointError

_SIGN = "$"
_NUMBERS = "biuf"  # kinds of numpy dtypes


def encode(value: Any, where: str, put: Callable[[Tensor], str]) -> Any:
    """`value` as JSON; `put` takes a tensor and returns the name under which it is saved."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor):
        return {"$tensor": put(value)}
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{where}[{index}]", put) for index, item in enumerate(value)]}
    if isinstance(value, list):
        return [encode(item, f"{where}[{index}]", put) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, put)
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_numpy(value, where, put)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise CheckpointError(
        f"{where}: a {type(value).__name__} cannot be saved: nothing is pickled. Give numbers, strings, tensors, or "
        "lists, tuples and dictionaries of them; an object's state_dict() often is that."
    )


def _encode_mapping(value: Mapping[Any, Any], where: str, put: Callable[[Tensor], str]) -> Any:
    if all(isinstance(key, str) and not key.startswith(_SIGN) for key in value):
        return {key: encode(item, f"{where}.{key}", put) for key, item in value.items()}
    pairs = [[encode(k, f"{where}: a key", put), encode(item, f"{where}[{k!r}]", put)] for k, item in value.items()]
    return {"$dict": pairs}


def _encode_numpy(value: Any, where: str, put: Callable[[Tensor], str]) -> Any:
    if value.ndim == 0:
        return encode(value.item(), where, put)
    if value.dtype.kind not in _NUMBERS:
        raise CheckpointError(f"{where}: a numpy array of {value.dtype} cannot be saved; expected numbers")
    name = put(torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy()))
    return {"$array": [name, value.dtype.str, list(value.shape)]}


def decode(value: Any, where: str, get: Callable[[str], Tensor]) -> Any:
    """Return what `encode` was given; `get` returns the tensor of a name."""
    if isinstance(value, list):
        return [decode(item, f"{where}[{index}]", get) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith(_SIGN):
        return {key: decode(item, f"{where}.{key}", get) for key, item in value.items()}
    (kind, content), *_ = value.items()
    if kind == "$float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if kind == "$tensor" and isinstance(content, str):
        return get(content)
    if kind == "$array" and isinstance(content, list) and len(content) == 3:
        return _array(content, where, get)
    if kind == "$tuple" and isinstance(content, list):
        return tuple(decode(content, where, get))
    if kind == "$dict" and isinstance(content, list) and all(isinstance(p, list) and len(p) == 2 for p in content):
        return {decode(key, where, get): decode(item, where, get) for key, item in content}
    raise CheckpointError(f"{where}: {kind!r}: not a value that shardwell has written")


def _array(content: list[Any], where: str, get: Callable[[str], Tensor]) -> Any:
    name, dtype, shape = content
    try:
        kind = np.dtype(dtype)
        if kind.kind not in _NUMBERS:
            raise TypeError(f"{dtype!r} is no number")
        return np.frombuffer(bytearray(get(name).numpy().tobytes()), kind).reshape(shape)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: not an array that shardwell has written ({error})") from None
