"""Sums of tensors that ranks have sent."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_in_rank_order(parts: list[Tensor], into: Tensor, scale: float, accumulate: bool) -> None:
    """Compute `into` = (or +=) `scale` x the sum of `parts`; 16-bit parts are summed in fp32 and rounded once."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    if accumulate:
        for part in parts:
            into.add_(part, alpha=scale)
        return
    if len(parts) == 1 and parts[0].dtype == into.dtype and scale == 1.0:
        into.copy_(parts[0])
        return
    total = into if into.dtype == wide else torch.empty_like(into, dtype=wide)
    if len(parts) == 1 or parts[0].dtype != wide:
        total.copy_(parts[0])
        rest = parts[1:]
    else:
        torch.add(parts[0], parts[1], out=total)
        rest = parts[2:]
    for part in rest:
        total.add_(part)
    if scale != 1.0:
        total.mul_(scale)
    if total is not into:
        into.copy_(total)
