"""The configuration that a Lightning strategy hands to `initialize`: the strategy's arguments, and what Lightning asks.

Nothing here imports Lightning, torch's optimizers or an engine.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwell.config.schema import Config
from shardwell.config.source import read
from shardwell.errors import ConfigError

NVME_PATH = "SHARDWELL_NVME_PATH"
_PRECISION_BLOCKS = ("bf16", "fp16", "torch_autocast")
_DTYPES = {"bf16-mixed": "bf16", "16-mixed": "fp16"}

# The names that both registries get, with the arguments of the strategy that each stands for.
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "shardwell": ("ZeRO stage 2", {}),
    "shardwell_stage_0": ("ZeRO stage 0: every rank holds everything", {"stage": 0}),
    "shardwell_stage_1": ("ZeRO stage 1: optimizer state is sharded", {"stage": 1}),
    "shardwell_stage_1_offload": (
        "ZeRO stage 1, with optimizer state in host memory",
        {"stage": 1, "offload_optimizer": True},
    ),
    "shardwell_stage_2": ("ZeRO stage 2: gradients are sharded, too", {"stage": 2}),
    "shardwell_stage_2_offload": (
        "ZeRO stage 2, with optimizer state in host memory",
        {"stage": 2, "offload_optimizer": True},
    ),
    "shardwell_stage_3": ("ZeRO stage 3: parameters are sharded, too", {"stage": 3}),
    "shardwell_stage_3_offload": (
        "ZeRO stage 3, with parameters and optimizer state in host memory",
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ),
    "shardwell_infinity": (
        f"ZeRO stage 3, with parameters and optimizer state on NVMe, under nvme_path or {NVME_PATH}",
        {
            "stage": 3,
            "offload_optimizer": True,
            "offload_parameters": True,
            "offload_optimizer_device": "nvme",
            "offload_params_device": "nvme",
        },
    ),
}


@dataclass(frozen=True)
class StrategyArguments:
    """The arguments that a strategy was constructed with; the names are those of Lightning's DeepSpeedStrategy."""

    stage: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_optimizer_device: str = "cpu"
    offload_params_device: str = "cpu"
    nvme_path: str | os.PathLike[str] | None = None
    config: Any = None

    def configuration(self) -> dict[str, Any]:
        """Return a configuration of one's own to add to: the given one, with what the other arguments ask for."""
        if isinstance(self.config, Config):
            raise ConfigError("config: a strategy adds to its configuration; give it a path or a dictionary")
        _, _, given = read(self.config)
        found: dict[str, Any] = copy.deepcopy(dict(given))
        zero = found.setdefault("zero_optimization", {})
        if not isinstance(zero, dict):
            raise ConfigError(f"zero_optimization: expected a block of keys, found {zero!r}")
        _agree(zero, "stage", self.stage, "zero_optimization.stage")
        zero.setdefault("stage", 2)
        if self.offload_optimizer:
            self._offload(zero, "offload_optimizer", self.offload_optimizer_device)
        if self.offload_parameters:
            self._offload(zero, "offload_param", self.offload_params_device)
        _check_accumulation(found)
        return found

    def _offload(self, zero: dict[str, Any], key: str, device: str) -> None:
        block = zero.setdefault(key, {})
        _agree(block, "device", device, f"zero_optimization.{key}.device")
        if device == "nvme" and not block.get("nvme_path"):
            block["nvme_path"] = os.fspath(self.nvme_path) if self.nvme_path is not None else _default_nvme_path()


def _agree(block: dict[str, Any], key: str, value: Any, name: str) -> None:
    """Set a key that an argument of the strategy asks for, and refuse another value in the configuration."""
    if value is None:
        return
    if key in block and block[key] != value:
        raise ConfigError(
            f"{name}: the configuration says {block[key]!r}, and the strategy's arguments say {value!r}; keep one"
        )
    block[key] = value


def _check_accumulation(found: Mapping[str, Any]) -> None:
    """Refuse accumulation in the configuration: Lightning counts micro-batches and divides the loss itself."""
    steps = found.get("gradient_accumulation_steps", 1)
    if steps not in (1, "auto", None):
        raise ConfigError(
            f"gradient_accumulation_steps: {steps!r} would divide gradients a second time. Lightning accumulates: "
            f"remove the key and use Trainer(accumulate_grad_batches={steps}), or count in the loop of Fabric"
        )


def _default_nvme_path() -> str:
    """Return the folder of states on NVMe if none was named."""
    if path := os.environ.get(NVME_PATH):
        return path
    path = tempfile.gettempdir()
    logging.getLogger("shardwell").warning(
        "states on NVMe go to %s, since no folder was named: set %s, or ShardwellStrategy(nvme_path=...), to a folder "
        "on a local NVMe disk",
        path,
        NVME_PATH,
    )
    return path


def computes_low(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration itself chooses a 16-bit compute dtype."""
    for name in _PRECISION_BLOCKS:
        block = config.get(name)
        if block is True or (isinstance(block, Mapping) and block.get("enabled", name != "torch_autocast") is True):
            return True
    return False


def with_precision(config: dict[str, Any], precision: str, scaler: Any = None) -> dict[str, Any]:
    """Return the configuration with what Lightning's `precision` asks of the engine.

    The mixed precisions compute in 16 bits and keep fp32 masters; the others are the dtypes of the model itself.
    `scaler` is the GradScaler that Lightning made for fp16: the engine's loss scale begins and grows as it would.
    """
    dtype = _DTYPES.get(precision)
    if dtype is None:
        return config
    if computes_low(config):
        asked = [name for name in _PRECISION_BLOCKS if name in config]
        if _asks_for(config, dtype):
            return config
        raise ConfigError(
            f"{', '.join(asked)}: contradicts precision={precision!r}; leave the block out, or the argument"
        )
    block: dict[str, Any] = {"enabled": True}
    if dtype == "fp16":
        block |= _scale_of(scaler)
    return {**config, dtype: block}


def _asks_for(config: Mapping[str, Any], dtype: str) -> bool:
    autocast = config.get("torch_autocast")
    if isinstance(autocast, Mapping) and autocast.get("enabled"):
        return str(autocast.get("dtype", "bf16")).replace("bfloat16", "bf16").replace("float16", "fp16") == dtype
    other = "fp16" if dtype == "bf16" else "bf16"
    return computes_low({dtype: config.get(dtype)}) and not computes_low({other: config.get(other)})


def _scale_of(scaler: Any) -> dict[str, Any]:
    """Return the loss scale's keys that behave as torch's GradScaler does."""
    initial = float(getattr(scaler, "_init_scale", None) or 65536.0)
    factors = getattr(scaler, "_growth_factor", 2.0), getattr(scaler, "_backoff_factor", 0.5)
    if not math.log2(initial).is_integer() or factors != (2.0, 0.5):
        raise ConfigError(
            f"the GradScaler begins at {initial:g} and moves by {factors}; the engine's loss scale is a power of two "
            "that is doubled and halved. Use such values, or set the fp16 block of the configuration"
        )
    return {
        "initial_scale_power": int(math.log2(initial)),
        "loss_scale_window": int(getattr(scaler, "_growth_interval", 2000)),
        "hysteresis": 1,
    }


def with_clipping(config: dict[str, Any], max_norm: float | None) -> dict[str, Any]:
    """Return the configuration with the Trainer's clipping by norm, which the engine's step performs."""
    given = config.get("gradient_clipping", "auto")
    if max_norm is None or max_norm <= 0:
        return config
    if given not in ("auto", 0, 0.0, None, max_norm):
        raise ConfigError(
            f"gradient_clipping: the configuration says {given!r}, and gradient_clip_val is {max_norm!r}; keep one"
        )
    return {**config, "gradient_clipping": float(max_norm)}


def for_evaluation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without what only training uses."""
    return {key: value for key, value in config.items() if key not in ("optimizer", "scheduler", "gradient_clipping")}


def stage_of(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage that a configuration asks for."""
    if config["zero_optimization"]["stage"] == "auto":
        raise ConfigError(
            'zero_optimization.stage "auto" is chosen by initialize, and Lightning asks for it before: write a number'
        )
    return int(config["zero_optimization"]["stage"])
