"""The model's buffers: on the device, in the compute dtype, the same on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from shardwell.sharding import EngineContext
from shardwell.sharding.spec import casts


def place_buffers(
    model: nn.Module, context: EngineContext, dtype: torch.dtype | None, kept: Sequence[str], *, kept_by_user: bool
) -> None:
    """Move buffers to the device, cast floating-point ones to `dtype`, and broadcast the values of rank 0.

    The cast is that of `model.to(dtype)`. Buffers whose name ends with one of `kept` keep their dtype.
    """
    found: set[str] = set()
    for name, buffer in model.named_buffers():
        suffixes = {suffix for suffix in kept if f".{name}".endswith(f".{suffix}")}
        found |= suffixes
        is_cast = dtype is not None and casts(buffer.dtype) and not suffixes
        buffer.data = buffer.data.to(context.device.torch_device, dtype if is_cast else None)
        context.roles.data.broadcast(buffer.data, token=f"SETUP {name}")
    missed = [suffix for suffix in kept if suffix not in found]
    if dtype is not None and kept_by_user and missed and context.roles.all.rank_group.rank == 0:
        known = ", ".join(name for name, buffer in model.named_buffers() if buffer.is_floating_point()) or "none"
        logging.getLogger("shardwell").warning(
            "shardwell.keep_fp32_buffers: no buffer's name ends with %s; the floating ones are: %s",
            ", ".join(map(repr, missed)),
            known,
        )
