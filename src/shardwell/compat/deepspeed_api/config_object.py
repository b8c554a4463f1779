"""`deepspeed.runtime.config`: a configuration as an object with DeepSpeed's attributes.

It is a view for code that reads one. The engine reads the same dictionary by `shardwell.config`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shardwell.compat.deepspeed_api import comm
from shardwell.compat.deepspeed_api import config_models as models
from shardwell.compat.deepspeed_api.logging import logger
from shardwell.config.source import read
from shardwell.errors import ConfigError

ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER = "adagrad", "adam", "adamw"
LAMB_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "lamb", "lion", "muon"
MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER = "muadam", "muadamw", "musgd"
DEEPSPEED_OPTIMIZERS = [
    *(ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER),
    *(MUSGD_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER),
]
TORCH_ADAM_PARAM, ADAM_W_MODE, ADAM_W_MODE_DEFAULT = "torch_adam", "adam_w_mode", True

_PLAIN: dict[str, Any] = {  # attribute, which is also the key -> default
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "managed_gradient_accumulation": True,
    "steps_per_print": None,
    "dump_state": False,
    "disable_python_gc": False,
    "disable_allgather": False,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
    "memory_breakdown": False,
    "dataloader_drop_last": False,
    "log_level": None,
}
_ACTIVATIONS: dict[str, Any] = {
    "partition_activations": False,
    "contiguous_memory_optimization": False,
    "cpu_checkpointing": False,
    "number_checkpoints": None,
    "synchronize_checkpoint_boundary": False,
    "profile": False,
}
_AIO: dict[str, Any] = {
    "block_size": 1048576,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}
_FLOPS: dict[str, Any] = {
    "enabled": False,
    "recompute_fwd_factor": 0.0,
    "profile_step": 1,
    "module_depth": -1,
    "top_modules": 1,
    "detailed": True,
    "output_file": None,
}
_PIPELINE: dict[str, Any] = {
    "stages": "auto",
    "partition": "best",
    "seed_layers": False,
    "activation_checkpoint_interval": 0,
    "pipe_partitioned": True,
    "grad_partitioned": True,
}
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


DeepSpeedConfigError = ConfigError  # an error about a configuration


class BatchSizeError(ConfigError, AssertionError):
    """The three batch sizes do not fit together; an AssertionError, as DeepSpeed raises."""


class DtypeEnum(Enum):
    """Dtypes by torch's and by other names."""

    fp16 = torch.float16
    fp32 = torch.float32
    int8 = torch.int8
    bf16 = torch.bfloat16

    @classmethod
    def _missing_(cls, value: object) -> DtypeEnum | None:
        name = str(value).removeprefix("torch.")
        short = {"float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "bfloat16": "bf16"}
        return cls.__members__.get(short.get(name, name))


class DeepSpeedConfig:
    """A configuration from a file, a dictionary or base64 of JSON, with the batch sizes of this number of ranks."""

    def __init__(self, config: str | os.PathLike[str] | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None):
        found = config if isinstance(config, Mapping) else read(config)[2]
        if repeated := getattr(found, "repeated", None):
            raise ConfigError(f"{config}: {', '.join(repeated)} is written more than once; keep one")
        self._param_dict: dict[str, Any] = config if isinstance(config, dict) else dict(found)
        self.global_rank = comm.get_rank()
        self.world_size = _world_size(self._param_dict, mpu, mesh_device)
        self._initialize_params(dict(self._param_dict))
        self._configure_train_batch_size()
        self._check()

    def _initialize_params(self, given: dict[str, Any]) -> None:
        for key, default in _PLAIN.items():
            setattr(self, key, given.get(key, default))
        self._read_gradients(given)
        self._read_zero_and_precision(given)
        self._read_optimizer(given)
        self._read_tools(given)
        self._read_checkpoint(given)

    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int | None
    gradient_clipping: float
    steps_per_print: int | None

    def _read_gradients(self, given: dict[str, Any]) -> None:
        self.communication_data_type = _dtype(given.get("communication_data_type"))
        self.seq_parallel_communication_data_type = _dtype(given.get("seq_parallel_communication_data_type", "fp32"))
        self.gradient_allreduce_op = str(given.get("gradient_allreduce_op", "mean")).lower()
        if self.gradient_allreduce_op not in ("mean", "sum"):
            raise ConfigError(f'gradient_allreduce_op: expected "mean" or "sum", found {self.gradient_allreduce_op!r}')

    def _read_zero_and_precision(self, given: dict[str, Any]) -> None:
        if (given.get("zero_optimization") or {}).get("stage") == "auto":
            raise ConfigError(
                'zero_optimization.stage "auto" is chosen by initialize, so a DeepSpeedConfig has none: write a '
                "number, or ask engine.zero_optimization_stage()"
            )
        self.zero_config = models.get_zero_config(given)
        self.zero_optimization_stage = int(self.zero_config.stage)
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config = models.get_float16_config(given)
        self.bfloat16_config = models.get_bfloat16_config(given)
        if self.float16_config.enabled and self.bfloat16_config.enabled:
            raise BatchSizeError("fp16.enabled contradicts bf16.enabled, both are true; keep one")
        autocast = given.get("torch_autocast") or {}
        self.torch_autocast_enabled = bool(autocast.get("enabled", False))
        named = autocast.get("dtype")
        self.torch_autocast_dtype = None if named is None else DtypeEnum(named).value
        self.torch_autocast_lower_precision_safe_modules = autocast.get("lower_precision_safe_modules")
        types = given.get("data_types") or {}
        self.grad_accum_dtype, self.param_dtype = types.get("grad_accum_dtype"), types.get("param_dtype")
        self.buffer_dtype, self.keep_in_fp32_modules = (
            types.get("buffer_dtype"),
            types.get("keep_in_fp32_modules", "auto"),
        )

    def _read_optimizer(self, given: dict[str, Any]) -> None:
        optimizer, scheduler = given.get("optimizer") or {}, given.get("scheduler") or {}
        name = optimizer.get("type")
        self.optimizer_name = name.lower() if name and name.lower() in DEEPSPEED_OPTIMIZERS else name
        self.optimizer_params = optimizer.get("params") if name else None
        self.optimizer_legacy_fusion = optimizer.get("legacy_fusion", False)
        self.scheduler_name = scheduler.get("type")
        self.scheduler_params = scheduler.get("params") if self.scheduler_name else None

    def _read_tools(self, given: dict[str, Any]) -> None:
        self.activation_checkpointing_config = _block(given, "activation_checkpointing", _ACTIVATIONS)
        self.flops_profiler_config = _block(given, "flops_profiler", _FLOPS)
        self.wall_clock_breakdown = bool(given.get("wall_clock_breakdown", False)) or self.flops_profiler_config.enabled
        self.monitor_config = models.get_monitor_config(given)
        self.comms_config = SimpleNamespace(comms_logger_enabled="comms_logger" in given)
        self.hybrid_engine = models.HybridEngineConfig(**(given.get("hybrid_engine") or {}))
        self.pipeline = {**_PIPELINE, **(given.get("pipeline") or {})}
        self.aio_config = {**_AIO, **(given.get("aio") or {})}
        self.data_efficiency_config = given.get("data_efficiency") or {}
        self.data_efficiency_enabled = bool(self.data_efficiency_config.get("enabled", False))
        self.use_data_before_expert_parallel_ = given.get("use_data_before_expert_parallelism", False)

    def _read_checkpoint(self, given: dict[str, Any]) -> None:
        block = given.get("checkpoint") or {}
        mode = str(block.get("tag_validation", "Warn")).upper()
        if mode not in ("WARN", "IGNORE", "FAIL"):
            raise DeepSpeedConfigError(
                f'checkpoint.tag_validation: expected "Ignore", "Warn" or "Fail", found {mode!r}'
            )
        self.checkpoint_tag_validation_enabled = mode != "IGNORE"
        self.checkpoint_tag_validation_fail = mode == "FAIL"
        self.load_universal_checkpoint = block.get("load_universal", False)
        self.use_node_local_storage = block.get("use_node_local_storage", False)
        self.checkpoint_parallel_write_pipeline = (block.get("parallel_write") or {}).get("pipeline_stage", False)
        self.checkpoint_config = block

    # --- batch sizes ---

    def _configure_train_batch_size(self) -> None:
        """Compute the batch sizes that are not given, and check that the three fit together."""
        train, micro, steps = (
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
        )
        ranks = self.world_size
        if train is None and micro is None:
            raise BatchSizeError("there is neither train_batch_size nor train_micro_batch_size_per_gpu; give one")
        if train is not None and micro is not None:
            steps = train // micro // ranks if steps is None else steps
        elif train is not None:
            steps = 1 if steps is None else steps
            micro = train // ranks // steps
        else:
            steps = 1 if steps is None else steps
            train = (micro or 0) * steps * ranks
        assert train is not None
        assert micro is not None
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = (
            train,
            micro,
            steps,
        )
        if min(train, micro, steps) <= 0 or train != micro * steps * ranks:
            raise BatchSizeError(
                f"train_batch_size {train} != train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
                f"{steps} x {ranks} ranks, or one of them is not above 0; correct or remove one"
            )

    _set_batch_related_parameters = _batch_assertion = _configure_train_batch_size

    def _check(self) -> None:
        stages, sixteen = (1, 2, 3), "16-bit masters are for stages 1 to 3"
        if self.gradient_allreduce_op == "sum" and self.zero_optimization_stage == 3:
            raise ConfigError('gradient_allreduce_op "sum" is not supported at stage 3; use "mean"')
        wants = self.float16_config.fp16_master_weights_and_grads or self.bfloat16_config.bf16_master_weights_and_grads
        if (wants or self.bfloat16_config.bf16_optimizer_states) and self.zero_optimization_stage not in stages:
            raise BatchSizeError(sixteen)
        if self.bfloat16_config.bf16_optimizer_states and not self.bfloat16_config.bf16_master_weights_and_grads:
            raise BatchSizeError("bf16_optimizer_states needs bf16_master_weights_and_grads; set both or none")

    def print_user_config(self) -> None:
        """Log the user's dictionary as JSON."""
        logger.info("  json = %s", json.dumps(self._param_dict, sort_keys=True, indent=4, default=str))

    def print(self, name: str) -> None:
        """Log all values, and the user's dictionary."""
        logger.info("%s:", name)
        for key, value in sorted(vars(self).items()):
            if key != "_param_dict":
                logger.info("  %-30s %s", key, value)
        self.print_user_config()


class DeepSpeedConfigWriter:
    """A configuration that is changed key by key, and written to a file."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data if data is not None else {}

    def add_config(self, key: str, value: Any) -> None:
        self.data[key] = value

    def load_config(self, filename: str) -> None:
        self.data = json.loads(Path(filename).read_text(), object_pairs_hook=dict_raise_error_on_duplicate_keys)

    def write_config(self, filename: str) -> None:
        Path(filename).write_text(json.dumps(self.data))


class DeepSpeedConfigObject:
    """An object that shows itself as JSON."""

    def repr(self) -> dict[str, Any]:
        return self.__dict__

    def __repr__(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True, indent=4, default=str)


class ScientificNotationEncoder(json.JSONEncoder):
    """An encoder of JSON that writes numbers above 1,000 as 1.000000e+03."""

    def encode(self, o: Any) -> str:
        return "".join(self.iterencode(o))

    def iterencode(self, o: Any, _one_shot: bool = False) -> Iterator[str]:
        yield self._text(o, 1)

    def _text(self, value: Any, depth: int) -> str:
        inner, outer = ("\n" + " " * (4 * level) for level in (depth, depth - 1))
        if isinstance(value, Mapping):
            members = [f"{inner}{json.dumps(str(key))}: {self._text(item, depth + 1)}" for key, item in value.items()]
            return "{" + ",".join(members) + (outer if members else "") + "}"
        if isinstance(value, Sequence) and not isinstance(value, str):
            return f"[{', '.join(self._text(item, depth) for item in value)}]"
        is_large = isinstance(value, int | float) and not isinstance(value, bool) and value > 1e3
        return f"{value:e}" if is_large else json.dumps(value, default=self.default)


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """Return a value of a configuration, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dictionary; refuse a key that is there twice."""
    twice = [key for key, times in Counter(key for key, _ in ordered_pairs).items() if times > 1]
    if twice:
        raise ConfigError(f"{', '.join(twice)} is written more than once in the same object; keep one")
    return dict(ordered_pairs)


def _world_size(given: Mapping[str, Any], mpu: Any, mesh_device: Any) -> int:
    """Return the ranks that see different data."""
    if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    if mpu is not None and hasattr(mpu, "get_sequence_parallel_world_size"):
        return comm.get_world_size() // int(mpu.get_sequence_parallel_world_size())
    if mesh_device is not None:
        return comm.get_world_size(mesh_device.get_group(mesh_dim="data_parallel"))
    return comm.get_world_size() // int(given.get("sequence_parallel_size") or 1)


def _dtype(name: Any) -> torch.dtype | None:
    if name is None:
        return None
    if str(name).lower() not in _DTYPES:
        raise ConfigError(f"communication_data_type: expected fp16, bf16 or fp32, found {name!r}")
    return _DTYPES[str(name).lower()]


def _block(given: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{**defaults, **(given.get(key) or {})})
