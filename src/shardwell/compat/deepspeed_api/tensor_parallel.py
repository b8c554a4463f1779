"""`tp_model_init`: accepted where it asks for nothing, refused where it asks for tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwell.errors import ShardwellError

_REASON = (
    "there is no tensor parallelism: ZeRO stage 3 shards the parameters over all ranks instead. Leave out "
    "tp_model_init and the tensor_parallel block"
)


def tp_model_init(
    model: nn.Module, tp_size: int = 1, dtype: Any = None, config: Any = None, **kwargs: Any
) -> nn.Module:
    """Return the model in this dtype for a size of 1; refuse a larger one."""
    if tp_size > 1:
        raise ShardwellError(f"tp_model_init(tp_size={tp_size}): {_REASON}")
    return model.to(dtype) if isinstance(dtype, torch.dtype) else model


def set_autotp_mode(training: bool = False) -> None:
    """Refuse to turn tensor parallelism on."""
    if training:
        raise ShardwellError(f"set_autotp_mode(training=True): {_REASON}")
