"""What `deepspeed.initialize` makes of the user's configuration before the engine reads it.

DeepSpeed's defaults hold where a script can see them: gradients are clipped at 1.0, a step whose gradients are not
finite is skipped, and parameters of fewer than 100,000 elements stay whole at stage 3. A schedule in the file is
DeepSpeed's own of that name, or torch's. What DeepSpeed ignores, and shardwell refuses, is reported and left out:
unknown keys at the top, and keys that a stage does not have. All other keys are for `shardwell.config`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from shardwell.compat.deepspeed_api import lr_schedules
from shardwell.compat.deepspeed_api.logging import logger
from shardwell.compat.deepspeed_api.nvme_folders import with_folders
from shardwell.config import SCHEDULERS, Config
from shardwell.config.field_types import flag, number
from shardwell.config.schedules import checked
from shardwell.config.suggestions import is_known_at_top, suggest
from shardwell.errors import ConfigError
from shardwell.runtime.precision import mixed_dtype

# What DeepSpeed warns about, and goes on: its sentence is in `lr_schedules`.
_FORGIVEN = ("scheduler.params.total_num_steps", "scheduler.params.warmup_type")


# Keys of ZeRO that DeepSpeed ignores below a stage: the stage, and the value that asks for nothing.
_FROM_STAGE: dict[str, tuple[int, Any]] = {
    "offload_param": (3, {"device": "none"}),
    "cpu_offload_param": (3, False),
    "cpu_offload_params": (3, False),
    "zero_hpz_partition_size": (3, 1),
    "zero_quantized_weights": (3, False),
    "zero_quantized_nontrainable_weights": (3, False),
    "zero_quantized_gradients": (2, False),
}


_HALF = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}


class EngineArguments(NamedTuple):
    """Arguments of `shardwell.initialize`."""

    config: Any
    lr_scheduler: Any  # the caller's, or a function that makes the one in the configuration


def for_engine(user: Any, *, optimizer: Any = None, lr_scheduler: Any = None) -> EngineArguments:
    """Return the configuration and the schedule for the engine; the caller's own objects have precedence."""
    if isinstance(user, Config) or not isinstance(user, Mapping):
        return EngineArguments(user, lr_scheduler)
    read_as = {key: _whole(key, value) for key, value in user.items() if not _is_left_out(str(key))}
    block = read_as.pop("scheduler", None)
    if block and lr_scheduler is None and (optimizer is not None or read_as.get("optimizer")):
        lr_scheduler = schedule_of(block)
    if isinstance(dtypes := read_as.get("data_types") or {}, Mapping):
        read_as["data_types"] = _dtypes(dtypes, dtype_of_model(read_as))
    if isinstance(rule := read_as.get("optimizer"), Mapping):
        read_as["optimizer"] = _known_of_optimizer(rule)
    if isinstance(zero := read_as.get("zero_optimization"), Mapping):
        read_as["zero_optimization"] = with_folders(_of_its_stage(zero))
    if flag(read_as.get("prescale_gradients")) is True and "gradient_predivide_factor" in read_as:
        _say_ignored(
            "gradient_predivide_factor", "with prescale_gradients", read_as.pop("gradient_predivide_factor"), 1.0
        )
    if read_as.get("gradient_clipping") in (None, "auto"):
        read_as["gradient_clipping"] = 1.0
    own = read_as.get("shardwell") or {}
    if isinstance(own, Mapping):  # the engine reports what is none
        read_as["shardwell"] = {"nonfinite": "skip", **own}
    return EngineArguments(read_as, lr_scheduler)


def _whole(key: Any, value: Any) -> Any:
    """Return the value of a key, without the fraction if it is a dotted key of ZeRO.

    TRL sets sizes of buckets to 0.9 times the square of a width, under keys that DeepSpeed does not look at.
    """
    is_size = isinstance(key, str) and key.startswith("zero_optimization.") and isinstance(value, float)
    return int(value) if is_size and math.isfinite(value) and value >= 1 else value


def _known_of_optimizer(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block of the optimizer without keys that DeepSpeed does not read."""
    for key in block:
        if key not in ("type", "params", "legacy_fusion"):
            logger.warning("optimizer.%s has no effect: arguments of the optimizer belong to optimizer.params", key)
    return {key: value for key, value in block.items() if key in ("type", "params", "legacy_fusion")}


def _dtypes(dtypes: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the block without dtypes of parameters and buffers that are cast so anyway.

    Micro-steps add up in the dtype of the model, as in DeepSpeed, unless the block names another.
    """
    names = [key for key, value in _HALF.items() if value is dtype]
    keys = ("param_dtype", "buffer_dtype")
    found = {key: value for key, value in dtypes.items() if key not in keys or value not in names}
    if names and found.get("grad_accum_dtype") is None:
        found["grad_accum_dtype"] = names[0]
    return found


def dtype_of_model(config: Any) -> torch.dtype | None:
    """Return the 16-bit dtype that a configuration computes in, or None."""
    if isinstance(config, Config):
        return mixed_dtype(config)
    for key, dtype in _HALF.items():
        block = config.get(key) if isinstance(config, Mapping) else None
        if isinstance(block, Mapping) and flag(number(block.get("enabled"))) is True:
            return dtype
    return None


def _of_its_stage(zero: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block of ZeRO without what its stage does not have; small parameters are as small as DeepSpeed's."""
    stage, found = number(zero.get("stage", 0)), dict(zero)
    if stage == 3 and not {"param_persistence_threshold", "stage3_param_persistence_threshold"} & found.keys():
        found["stage3_param_persistence_threshold"] = 100_000
    for key, (least, nothing) in _FROM_STAGE.items():
        if key in found and isinstance(stage, int | float) and stage < least:
            value = found.pop(key)
            asked = value.get("device", "none") if isinstance(value, Mapping) else value
            idle = nothing["device"] if isinstance(nothing, Mapping) else nothing
            _say_ignored(f"zero_optimization.{key}", f"at stage {stage}", asked, idle)
    return found


def _say_ignored(key: str, where: str, value: Any, idle: Any) -> None:
    """Warn that a key has no effect, unless it asks for nothing."""
    if flag(number(value)) not in (None, "auto", False, idle, flag(idle)):
        logger.warning("%s has no effect %s: %s is ignored, as DeepSpeed does", key, where, value)


def _is_left_out(key: str) -> bool:
    if is_known_at_top(key):
        return False
    logger.warning("the configuration has an unknown key, which has no effect: %s; %s", key, suggest(key))
    return True


def schedule_of(block: Any) -> Any:
    """Return a function that makes the schedule of the block `scheduler` for an optimizer."""
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        raise ConfigError(f'scheduler: expected an object with a type, such as {{"type": "WarmupLR"}}, found {block!r}')
    params = block.get("params") or {}
    if not isinstance(params, Mapping):
        raise ConfigError(f"scheduler.params: expected an object, found {params!r}")
    given = {str(key): value for key, value in params.items() if value != "auto"}
    name = {kind.lower(): kind for kind in SCHEDULERS}.get(block["type"].lower())
    if name is not None:
        return partial(_make, lr_schedules.KINDS[name], _arguments(name, given))
    kind = getattr(torch.optim.lr_scheduler, block["type"], None)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        known = ", ".join(SCHEDULERS)
        raise ConfigError(f"scheduler.type: {block['type']!r} is not known; known are {known} and torch's schedulers")
    return partial(_make, kind, {key: number(value) for key, value in given.items()})


def _arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of DeepSpeed's schedule; problems that DeepSpeed only warns about are left to it."""
    clean, problems = checked(name, given)
    wrong = [(key, sentence) for key, sentence in problems if key not in _FORGIVEN or "missing" in sentence]
    if wrong:
        raise ConfigError("\n".join(f"{key}: {sentence}" for key, sentence in wrong))
    return {**given, **clean}


def _make(kind: Any, params: Mapping[str, Any], optimizer: Any) -> Any:
    try:
        return kind(optimizer, **params)
    except TypeError as error:
        raise ConfigError(f"scheduler.params: {kind.__name__} does not take these: {error}") from error
