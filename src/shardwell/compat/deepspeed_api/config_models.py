"""DeepSpeed's configuration blocks as pydantic models, for code that builds or reads one.

The names, defaults and checks are DeepSpeed's. The engine does not read these: it reads the user's dictionary, by
`shardwell.config`, which says what has an effect.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from enum import Enum
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_serializer, field_validator, model_validator

from shardwell.compat.deepspeed_api.logging import logger


class pp_int(int):  # noqa: N801 - DeepSpeed's name
    """An integer that shows itself with commas, or as the given text."""

    custom_print_str: str | None

    def __new__(cls, val: Any, custom_print_str: str | None = None) -> pp_int:
        made = super().__new__(cls, val)
        made.custom_print_str = custom_print_str
        return made

    def __repr__(self) -> str:
        return getattr(self, "custom_print_str", None) or f"{int(self):,}"


class DeepSpeedConfigModel(BaseModel):
    """The base of DeepSpeed's blocks: "auto" counts as absent, and old fields hand their values to new ones.

    A field with `json_schema_extra={"deprecated": True, "new_param": ..., "new_param_fn": ...}` is an old one.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        given = data if strict else {k: v for k, v in data.items() if v != "auto" or k == "replace_method"}
        super().__init__(**given)
        for name, info in type(self).model_fields.items():
            extra = info.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._hand_over(name, dict(extra))

    def _hand_over(self, old: str, extra: dict[str, Any]) -> None:
        """Warn about an old field that was given, and give its value to the new one."""
        new = str(extra.get("new_param", ""))
        logger.warning("%s is an old name%s %s", old, f": use {new}." if new else ".", extra.get("deprecated_msg", ""))
        if not new or not extra.get("set_new_param", True):
            return
        translate: Callable[[Any], Any] = extra.get("new_param_fn", lambda value: value)
        value = translate(getattr(self, old))
        *blocks, name = new.split(".")
        home: Any = reduce(getattr, blocks, self)
        if name in home.model_fields_set:
            raise AssertionError(f"{old} is the old name of {new}, and both are given; keep {new}")
        setattr(home, name, value)

    @field_serializer("dtype", check_fields=False)
    def serialize_torch_dtype(self, dtype: Any) -> str:
        return str(dtype)


def get_config_default(config: type[BaseModel], field_name: str) -> Any:
    """Return the default of a field of a block."""
    if field_name not in config.model_fields or config.model_fields[field_name].is_required():
        raise AssertionError(f"{config.__name__} has no field {field_name!r} with a default")
    return config.model_fields[field_name].get_default()


def _old(new: str, translate: Callable[[Any], Any] = lambda value: value, sets: bool = True) -> Any:
    return {"deprecated": True, "new_param": new, "new_param_fn": translate, "set_new_param": sets}


class OffloadDeviceEnum(str, Enum):
    """The devices that states may be stored on."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class ZeroStageEnum(int, Enum):
    """The stages by name."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796 - another name of the last one


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """The block `offload_param`."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = Field(5, ge=0)
    buffer_size: int = Field(pp_int(1e8), ge=0)
    max_in_cpu: int = Field(pp_int(1e9), ge=0)
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """The block `offload_optimizer`."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: int = Field(4, ge=0)
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = Field(1.0, ge=0.0, le=1.0)
    super_offload: bool = False
    cpuadam_cores_perc: float = Field(0.8, ge=0.0, le=1.0)

    @property
    def pipeline(self) -> bool:
        """Whether reads run ahead, or writes behind."""
        return self.pipeline_read or self.pipeline_write


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """The block `leaf_module`."""

    classes: list[str] = []
    names: list[str] = []
    name_suffixes: list[str] = []


def _on_cpu(kind: type[DeepSpeedConfigModel]) -> Callable[[Any], Any]:
    return lambda value: kind(device=OffloadDeviceEnum.cpu) if value else None


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """The block `zero_optimization`."""

    stage: ZeroStageEnum = ZeroStageEnum.disabled
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = Field(pp_int(5e8), gt=0)
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = Field(pp_int(5e8), ge=0)
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    zenflow: dict[str, Any] | None = None
    sub_group_size: int = Field(pp_int(1e9), ge=0)
    cpu_offload_param: bool | None = Field(
        None, json_schema_extra=_old("offload_param", _on_cpu(DeepSpeedZeroOffloadParamConfig))
    )
    cpu_offload_use_pin_memory: bool | None = Field(
        None, json_schema_extra=_old("offload_param or offload_optimizer", sets=False)
    )
    cpu_offload: bool | None = Field(
        None, json_schema_extra=_old("offload_optimizer", _on_cpu(DeepSpeedZeroOffloadOptimizerConfig))
    )
    prefetch_bucket_size: int = Field(pp_int(5e7), ge=0, alias="stage3_prefetch_bucket_size")
    param_persistence_threshold: int = Field(pp_int(1e5), ge=0, alias="stage3_param_persistence_threshold")
    model_persistence_threshold: int = Field(
        pp_int(sys.maxsize, "sys.maxsize"), ge=0, alias="stage3_model_persistence_threshold"
    )
    max_live_parameters: int = Field(pp_int(1e9), ge=0, alias="stage3_max_live_parameters")
    max_reuse_distance: int = Field(pp_int(1e9), ge=0, alias="stage3_max_reuse_distance")
    gather_16bit_weights_on_model_save: bool = Field(False, alias="stage3_gather_16bit_weights_on_model_save")
    module_granularity_threshold: int = Field(pp_int(0), alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: bool = Field(False, alias="stage3_use_all_reduce_for_fetch_params")
    allgather_sequential: bool = Field(False, alias="stage3_allgather_sequential")
    adaptive_prefetch_bucket_size: bool = Field(False, alias="stage3_adaptive_prefetch_bucket_size")
    adaptive_prefetch_min_size: int = Field(pp_int(1e7), ge=0, alias="stage3_adaptive_prefetch_min_size")
    adaptive_prefetch_max_size: int = Field(pp_int(5e8), ge=0, alias="stage3_adaptive_prefetch_max_size")
    stage3_gather_fp16_weights_on_model_save: bool = Field(
        False, json_schema_extra=_old("gather_16bit_weights_on_model_save")
    )
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: int = Field(1, ge=0)
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)

    @model_validator(mode="after")
    def _overlap_at_stage_3(self) -> DeepSpeedZeroConfig:
        if self.overlap_comm is None:
            self.__dict__["overlap_comm"] = int(self.stage) == ZeroStageEnum.weights
        return self

    @model_validator(mode="after")
    def _check_stage(self) -> DeepSpeedZeroConfig:
        if self.offload_optimizer is not None and self.offload_optimizer.ratio < 1.0 and int(self.stage) != 3:
            raise ValueError("offload_optimizer.ratio below 1 is for stage 3; use 1.0")
        if not self.compute_grad_norm and int(self.stage) not in (1, 2):
            raise ValueError("compute_grad_norm false is for stages 1 and 2; use true")
        return self


def get_zero_config(param_dict: dict[str, Any]) -> DeepSpeedZeroConfig:
    """Return the block `zero_optimization`; true is stage 1, as it was before there were stages."""
    block = param_dict.get("zero_optimization") or {}
    return DeepSpeedZeroConfig(**({"stage": 1} if block is True else block))


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """The block `bf16`."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """The block `fp16`."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False

    @field_validator("loss_scale", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _is_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what is no finite number, also true, which would count as 1."""
        key = f"fp16.{info.field_name}"
        if isinstance(value, bool):
            raise ValueError(f"{key} must be a number, not true or false")
        try:
            found = float(value)
        except (TypeError, ValueError):
            kind = "a number" if info.field_name == "loss_scale" else "an integer, so it must be a number"
            raise ValueError(f"{key} must be {kind}") from None
        if not math.isfinite(found):
            raise ValueError(f"{key} must be a finite number")
        if info.field_name == "loss_scale" and found < 0:
            raise ValueError(f"{key} must be at least 0; 0 means a dynamic scale")
        return value

    @model_validator(mode="after")
    def _check_scale(self) -> DeepSpeedFP16Config:
        """Refuse a window or a smallest scale of 0, where the scale is dynamic."""
        if self.enabled and self.loss_scale == 0:
            for key in ("loss_scale_window", "min_loss_scale"):
                if getattr(self, key) <= 0:
                    raise ValueError(f"fp16.{key} must be above 0 where the loss scale is dynamic (loss_scale 0)")
        return self

    def initial_dynamic_scale(self) -> int:
        """Return the scale of the first step."""
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the arguments of a dynamic loss scaler."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


def get_bfloat16_config(param_dict: dict[str, Any]) -> DeepSpeedBF16Config:
    """Return the block `bf16`, also by its old name."""
    block = param_dict.get("bf16")
    return DeepSpeedBF16Config(**(param_dict.get("bfloat16") or {} if block is None else block))


def get_float16_config(param_dict: dict[str, Any]) -> DeepSpeedFP16Config:
    """Return the block `fp16`."""
    return DeepSpeedFP16Config(**(param_dict.get("fp16") or {}))


class HybridEngineConfig(DeepSpeedConfigModel):
    """The block `hybrid_engine`."""

    enabled: bool = False
    max_out_tokens: int = Field(512, gt=0)
    inference_tp_size: int = 1
    release_inference_cache: bool = False
    pin_parameters: bool = True
    tp_gather_partition_size: int = 8
    enable_cuda_graph: bool = False


class MonitorConfig(DeepSpeedConfigModel):
    """One of the blocks that write metrics somewhere."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = False


class DeepSpeedMonitorConfig(DeepSpeedConfigModel):
    """The blocks `tensorboard`, `wandb`, `comet` and `csv_monitor`."""

    tensorboard: MonitorConfig = MonitorConfig()
    comet: MonitorConfig = MonitorConfig()
    wandb: MonitorConfig = MonitorConfig()
    csv_monitor: MonitorConfig = MonitorConfig()

    @property
    def enabled(self) -> bool:
        """Whether one of them is on."""
        return any(block.enabled for block in (self.tensorboard, self.comet, self.wandb, self.csv_monitor))


def get_monitor_config(param_dict: dict[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the blocks that write metrics."""
    return DeepSpeedMonitorConfig.model_validate(
        {name: param_dict.get(name) or {} for name in DeepSpeedMonitorConfig.model_fields}
    )
