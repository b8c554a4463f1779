"""Bringing a batch to the device, and to the compute dtype under mixed precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def moved(value: T, device: torch.device, dtype: torch.dtype | None = None) -> T:
    """`value` with its tensors on `device`; floating ones in `dtype` if it is given. Unknown containers stay as they are."""
    result: Any = value
    if isinstance(value, Tensor):
        floating = dtype is not None and value.is_floating_point()
        if value.device != device or (floating and value.dtype != dtype):
            result = value.to(device, dtype if floating else None, non_blocking=True)
    elif isinstance(value, tuple):
        items = [moved(item, device, dtype) for item in value]
        result = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif isinstance(value, list):
        result = [moved(item, device, dtype) for item in value]
    elif type(value) is dict or (isinstance(value, Mapping) and hasattr(value, "data")):
        items_by_key = {key: moved(item, device, dtype) for key, item in value.items()}
        result = items_by_key if type(value) is dict else type(value)(items_by_key)
    return result
