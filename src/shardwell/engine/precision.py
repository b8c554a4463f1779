"""Which dtypes a configuration means."""

from __future__ import annotations

import torch

from shardwell.config import Config

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype that a configuration's word means."""
    return None if name is None else _DTYPES[name]


def mixed_dtype(config: Config) -> torch.dtype | None:
    """What the model computes in, if that is not what its parameters are given in."""
    if config.bf16.enabled:
        return torch.bfloat16
    return torch.float16 if config.fp16.enabled else None


def is_scaled(config: Config) -> bool:
    """Whether losses are scaled: fp16 needs that, in the model or in autocast."""
    return config.fp16.enabled or (config.torch_autocast.enabled and config.torch_autocast.dtype == "fp16")
