"""Bringing a batch to the device, and to the compute dtype under mixed precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwell.engine.nested import map_tensors


def moved(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """`value` with its tensors on `device`; floating ones in `dtype` if given. Unknown containers stay as they are."""

    def move(tensor: Tensor) -> Tensor:
        floating = dtype is not None and tensor.is_floating_point()
        return tensor.to(device, dtype if floating else None, non_blocking=True)

    return map_tensors(value, move)
