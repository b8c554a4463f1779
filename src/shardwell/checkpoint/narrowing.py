"""Values that a dtype cannot hold: rounding is expected of a narrower one, and another number is not."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwell.errors import CheckpointError

_PART = 2**22  # elements that are compared at once


def holds_all(stored: torch.dtype, dtype: torch.dtype) -> bool:
    """Tell whether a dtype has the range of another, so that at most rounding can change a value."""
    if stored == dtype or stored is torch.bool:
        return True
    if dtype is torch.bool:
        return False
    if stored.is_floating_point and not dtype.is_floating_point:
        return False
    info, mine = (torch.finfo(one) if one.is_floating_point else torch.iinfo(one) for one in (stored, dtype))
    return mine.min <= info.min and info.max <= mine.max


def first_lost(values: Tensor, dtype: torch.dtype) -> float | int | None:
    """Return the first value that becomes infinite in a dtype, or another number than rounding makes of it."""
    if holds_all(values.dtype, dtype):
        return None
    flat = values.detach().reshape(-1)
    for start in range(0, flat.numel(), _PART):
        part = flat[start : start + _PART]
        cast = part.to(dtype)
        if dtype.is_floating_point:
            wide = part.float() if part.dtype.itemsize < 4 else part
            lost = wide.isfinite() & ~_is_limit(part)
            lost &= wide.abs() > 1.1 * torch.finfo(dtype).max if dtype.itemsize == 1 else ~cast.isfinite()
        else:
            lost = cast.to(part.dtype) != part
        if bool(lost.any()):
            return part[lost][0].item()
    return None


def _is_limit(values: Tensor) -> Tensor:
    """Tell which values are the greatest or least of their dtype: masks have them for infinity."""
    if not values.dtype.is_floating_point:
        return torch.zeros_like(values, dtype=torch.bool)
    limits = torch.finfo(values.dtype)
    return (values == limits.min) | (values == limits.max)


def check_holds(values: Tensor, dtype: torch.dtype, where: str) -> None:
    """Raise if a dtype cannot hold one of the values."""
    lost = first_lost(values, dtype)
    if lost is not None:
        raise CheckpointError(
            f"{where}: holds {lost!r}, which {dtype}, the dtype that it has in the model, cannot. Give the parameter "
            f"or buffer a dtype that can, such as {values.dtype}"
        )
