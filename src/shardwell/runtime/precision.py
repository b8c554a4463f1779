"""The dtypes and the loss scale of a configuration."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from shardwell.config import Config
from shardwell.optim.loss_scale import DynamicScale, LossScale, NoScale, ScaleRules
from shardwell.runtime.meta_autocast import MetaAutocast

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the dtype for a word of the configuration."""
    return None if name is None else _DTYPES[name]


def mixed_dtype(config: Config) -> torch.dtype | None:
    """Return the compute dtype, if it differs from the dtype of the given parameters."""
    if config.bf16.enabled:
        return torch.bfloat16
    return torch.float16 if config.fp16.enabled else None


def has_narrow_masters(config: Config) -> bool:
    """Return whether master weights have the compute dtype instead of fp32."""
    return config.bf16.enabled and config.bf16.bf16_master_weights_and_grads


def is_scaled(config: Config) -> bool:
    """Return whether losses are scaled: fp16 needs that, in the model or in autocast."""
    return config.fp16.enabled or (config.torch_autocast.enabled and config.torch_autocast.dtype == "fp16")


def settle_precision(config: Config, parameters: Iterable[Tensor]) -> Config:
    """Return the configuration without "auto" for bf16 and fp16: the dtype of most parameters decides."""
    asked = {name: config.origins.get(f"{name}.enabled", "").startswith("auto ->") for name in ("bf16", "fp16")}
    if not any(asked.values()):
        return config
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        sizes[parameter.dtype] += parameter.numel() if parameter.dtype.is_floating_point else 0
    dtype = sizes.most_common(1)[0][0] if sizes else torch.float32
    is_free = not (config.bf16.enabled or config.fp16.enabled or config.torch_autocast.enabled)
    origins, values = dict(config.origins), {}
    for name in (name for name, is_auto in asked.items() if is_auto):
        block = getattr(config, name)
        is_on = is_free and dtype is _DTYPES[name]
        values[name] = block.model_copy(update={"enabled": is_on})
        short = str(dtype).removeprefix("torch.")
        origins[f"{name}.enabled"] = f"auto -> {str(is_on).lower()} (the model's parameters are {short})"
    return config.with_origins(origins, values)


def autocast_of(config: Config, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a function that makes an autocast context, or an empty one.

    It is without torch's cache of casts, which would keep a copy of every weight used.
    """
    block = config.torch_autocast
    if not block.enabled:
        return contextlib.nullcontext
    if device.type == "meta":
        return partial(MetaAutocast, _DTYPES[block.dtype])
    return partial(torch.autocast, device.type, dtype_of(block.dtype), cache_enabled=False)


def loss_scale_of(settings: Config) -> LossScale:
    """Return the loss scale that the configuration sets."""
    if not is_scaled(settings):
        return NoScale()
    fp16 = settings.fp16
    if fp16.loss_scale > 0:
        return LossScale(fp16.loss_scale)
    rules = ScaleRules(fp16.loss_scale_window, fp16.hysteresis, fp16.consecutive_hysteresis, fp16.min_loss_scale)
    return DynamicScale(2.0**fp16.initial_scale_power, rules)
