"""Arguments of `initialize` that would be ignored, or fail far from here, if they were taken as they come."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwell.engine.engine import Engine
from shardwell.errors import ConfigError, ShardwellError
from shardwell.memory.local_gpus import default_device, device_named
from shardwell.sharding import released

_KEY = "deepspeed_config"
_NO_ARGUMENTS = (bool, int, float, str, bytes, os.PathLike, list, tuple, set, nn.Module, torch.Tensor)


def configuration_of(args: Any, config: Any, config_params: Any) -> Any:
    """Return the configuration from the one argument that has it; None if none has."""
    if isinstance(args, _NO_ARGUMENTS):
        raise ConfigError(
            f"initialize(args=...): expected what argparse returns, found a {type(args).__name__}; a configuration "
            "goes to config=..."
        )
    has_key = _KEY in args if isinstance(args, Mapping) else hasattr(args, _KEY)
    in_args = None if not has_key else args[_KEY] if isinstance(args, Mapping) else getattr(args, _KEY)
    named = {"config": config, "config_params": config_params, f"args.{_KEY}": in_args}
    given = {name: value for name, value in named.items() if value is not None}
    for name, value in given.items():
        (first, chosen), *_ = given.items()
        if value is not chosen and (type(value) is not type(chosen) or value != chosen):
            raise ConfigError(f"initialize got two configurations, {first} and {name}, which differ; pass one of them")
    if not given and args is not None and not has_key:
        raise ConfigError(
            f"initialize(args=...): the {type(args).__name__} has no {_KEY}, and there is no config=...; pass one"
        )
    return next(iter(given.values()), None)


def check_calls(engine_class: Any, collate_fn: Any) -> None:
    """Refuse a class that is no engine's, and a `collate_fn` that cannot be called."""
    if collate_fn is not None and not callable(collate_fn):
        raise ShardwellError(
            f"initialize(collate_fn=...): expected a function of a list of samples, found {type(collate_fn).__name__}"
        )
    if not (isinstance(engine_class, type) and issubclass(engine_class, Engine)):
        kind = f"the class {engine_class.__name__}" if isinstance(engine_class, type) else type(engine_class).__name__
        raise ShardwellError(f"initialize(engine_class=...): expected shardwell.Engine or a subclass, found {kind}")


def device_for(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the device of this rank: the one that was named, the meta device for a model on it, or the default."""
    if device is None and any(parameter.is_meta for parameter in model.parameters()):
        return torch.device("meta")
    found = default_device() if device is None else device_named(device, "initialize(device=...)")
    for name, parameter in model.named_parameters() if found.type == "meta" else ():
        if not (parameter.is_meta or released.is_owned(parameter)):
            raise ShardwellError(
                f"initialize(device=...): the meta device holds no values, and parameter '{name}' has some on "
                f"{parameter.device}. Make the model under torch.device('meta') for a dry run, or name another device"
            )
    return found
