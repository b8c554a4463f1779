"""Optimizer state entries that do not have the parameter's shape, as JSON with their types.

A number is what torch's optimizers keep: a tensor without dimensions, such as their step counts. Every other entry
(integers, flags, texts, None, tensors of other shapes and dtypes, containers of them) is an object {"kept": ...}, from
which it is restored in its type. All of it is small, and is stored in the manifest of a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwell.errors import CheckpointError
from shardwell.json_values import decode, encode

_KEPT, _BESIDE = "kept", "beside"  # the latter: its tensors are on the parameter's device
_MOST_BYTES = 2**16


@dataclass(frozen=True)
class KeptEntries:
    """A state entry that is kept as it is."""

    value: Any


def is_usual(value: Any, usual: Tensor) -> bool:
    """Return whether an entry is a number as this optimizer keeps it, of which `usual` is an example."""
    return isinstance(value, Tensor) and (value.ndim, value.dtype, value.device) == (0, usual.dtype, usual.device)


def state_to_json(value: Any, usual: Tensor | None, where: str) -> Any:
    """Convert a state entry to JSON; one like `usual`, a number as this optimizer keeps it, becomes a number."""
    if usual is not None and is_usual(value, usual):
        return float(value)
    devices: list[torch.device] = []

    def put(tensor: Tensor) -> str:
        if tensor.numel() * tensor.dtype.itemsize > _MOST_BYTES:
            raise CheckpointError(
                f"{where}: a tensor of shape {tuple(tensor.shape)} is not of the parameter's shape, so that it cannot "
                f"be cut over ranks, and too large to be kept beside it: expected at most {_MOST_BYTES} bytes"
            )
        devices.append(tensor.device)
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        shape = "x".join(map(str, tensor.shape))
        return f"{str(tensor.dtype).removeprefix('torch.')} {shape} {data.hex()}"

    kept = {_KEPT: encode(value, where, put)}
    return {**kept, _BESIDE: True} if any(device.type != "cpu" for device in devices) else kept


def state_from_json(saved: Any, device: torch.device, where: str) -> Any:
    """Return the entry that `state_to_json` was given. `saved` is no number."""
    if not isinstance(saved, dict) or _KEPT not in saved:
        raise CheckpointError(f"{where}: expected a number or an object with {_KEPT!r}, found {str(saved)[:80]!r}")
    place = device if saved.get(_BESIDE) else torch.device("cpu")

    def get(text: str) -> Tensor:
        name, shape, data = [*text.split(" "), "", ""][:3]
        dtype = getattr(torch, name, None)
        try:
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name!r} is no dtype")
            sizes = [int(size) for size in shape.split("x")] if shape else []
            raw = torch.frombuffer(bytearray(bytes.fromhex(data)), dtype=torch.uint8) if data else torch.empty(0)
            flat = raw.view(dtype) if data else torch.empty(0, dtype=dtype)
            return flat.reshape(sizes).clone().to(place)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{where}: not a tensor that shardwell has written ({error})") from None

    return decode(saved[_KEPT], where, get)
