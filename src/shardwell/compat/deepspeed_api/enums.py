"""DeepSpeed's enumerations, and its offload blocks as plain values."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

from shardwell.config import OffloadOptimizerConfig, OffloadParamConfig


class OffloadDeviceEnum(str, Enum):
    """The devices that states may be stored on."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The states that `offload_states` names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroParamType(Enum):
    """The kinds of parameters."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """The states of a parameter: its values are in memory on this rank, are not, or are in flight."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def offload_block(block: OffloadParamConfig | OffloadOptimizerConfig) -> Any:
    """Return an offload block as DeepSpeed's getters do: None where nothing is offloaded."""
    if block.device == "none":
        return None
    return SimpleNamespace(**{**block.model_dump(), "device": OffloadDeviceEnum(block.device)})
