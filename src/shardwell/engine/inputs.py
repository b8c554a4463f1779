"""Bringing a batch to the device, and to the compute dtype under mixed precision."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
from torch import Tensor


def moved(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """`value` with its tensors on `device`; floating ones in `dtype` if given. Unknown containers stay as they are."""
    if isinstance(value, Tensor):
        floating = dtype is not None and value.is_floating_point()
        return value.to(device, dtype if floating else None, non_blocking=True)
    if isinstance(value, tuple):
        items = [moved(item, device, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [moved(item, device, dtype) for item in value]
    if isinstance(value, dict | UserDict):
        kind: Any = type(value)
        return kind({key: moved(item, device, dtype) for key, item in value.items()})
    return value
