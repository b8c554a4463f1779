"""The getters of DeepSpeed's engine: each is a key of the configuration, under the name that DeepSpeed gave it.

A key that has an effect here is read from the configuration in force; one that has none, from the user's file, with
DeepSpeed's default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.utils.data

from shardwell.compat.deepspeed_api import groups

_ZERO = "zero_optimization."

# name of the getter: key of the configuration, and DeepSpeed's default where the key has no effect here
GETTERS: dict[str, tuple[str, Any]] = {
    "wall_clock_breakdown": ("wall_clock_breakdown", False),
    "memory_breakdown": ("memory_breakdown", False),
    "flops_profiler_enabled": ("flops_profiler.enabled", False),
    "flops_profiler_profile_step": ("flops_profiler.profile_step", 1),
    "flops_profiler_module_depth": ("flops_profiler.module_depth", -1),
    "flops_profiler_top_modules": ("flops_profiler.top_modules", 1),
    "flops_profiler_detailed": ("flops_profiler.detailed", True),
    "flops_profiler_output_file": ("flops_profiler.output_file", None),
    "dump_state": ("dump_state", False),
    "log_level": ("log_level", None),
    "dataloader_drop_last": ("dataloader_drop_last", False),
    "sparse_gradients_enabled": ("sparse_gradients", False),
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
    "steps_per_print": ("steps_per_print", None),
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "managed_gradient_accumulation": ("managed_gradient_accumulation", True),
    "use_node_local_storage": ("checkpoint.use_node_local_storage", False),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "fp16_enabled": ("fp16.enabled", False),
    "fp16_auto_cast": ("fp16.auto_cast", False),
    "fp16_master_weights_and_gradients": ("fp16.fp16_master_weights_and_grads", False),
    "bfloat16_enabled": ("bf16.enabled", False),
    "bf16_master_weights_and_gradients": ("bf16.bf16_master_weights_and_grads", False),
    "bf16_optimizer_states": ("bf16.bf16_optimizer_states", False),
    "torch_autocast_enabled": ("torch_autocast.enabled", False),
    "torch_autocast_lower_precision_safe_modules": ("torch_autocast.lower_precision_safe_modules", None),
    "aio_config": ("aio", None),
    "zero_reduce_scatter": (f"{_ZERO}reduce_scatter", True),
    "zero_overlap_comm": (f"{_ZERO}overlap_comm", None),
    "zero_sub_group_size": (f"{_ZERO}sub_group_size", 1_000_000_000),
    "zero_reduce_bucket_size": (f"{_ZERO}reduce_bucket_size", 500_000_000),
    "zero_multi_rank_bucket_allreduce": (f"{_ZERO}use_multi_rank_bucket_allreduce", True),
    "zero_allgather_bucket_size": (f"{_ZERO}allgather_bucket_size", 500_000_000),
    "zero_allgather_partitions": (f"{_ZERO}allgather_partitions", True),
    "zero_allgather_sequential": (f"{_ZERO}stage3_allgather_sequential", False),
    "zero_compute_grad_norm": (f"{_ZERO}compute_grad_norm", True),
    "zero_contiguous_gradients": (f"{_ZERO}contiguous_gradients", True),
    "zero_round_robin_gradients": (f"{_ZERO}round_robin_gradients", False),
    "zero_parameter_alignment": (f"{_ZERO}parameter_alignment", None),
    "zero_load_from_fp32_weights": (f"{_ZERO}load_from_fp32_weights", True),
    "zero_elastic_checkpoint": (f"{_ZERO}elastic_checkpoint", False),
    "zero_ignore_unused_parameters": (f"{_ZERO}ignore_unused_parameters", True),
    "zero_legacy_stage1": (f"{_ZERO}legacy_stage1", False),
    "zero_log_trace_cache_warnings": (f"{_ZERO}log_trace_cache_warnings", False),
    "zero_save_muon_momentum_buffer_in_memory": (f"{_ZERO}save_muon_momentum_buffer_in_memory", False),
    "zero_module_granularity_threshold": (f"{_ZERO}stage3_module_granularity_threshold", 0),
    "is_sanity_checks_enabled": (f"{_ZERO}enable_sanity_checks", False),
    "zero_max_live_parameters": (f"{_ZERO}stage3_max_live_parameters", None),
    "zero_max_reuse_distance": (f"{_ZERO}stage3_max_reuse_distance", None),
    "zero_prefetch_bucket_size": (f"{_ZERO}stage3_prefetch_bucket_size", None),
    "zero_param_persistence_threshold": (f"{_ZERO}stage3_param_persistence_threshold", None),
    "zero_model_persistence_threshold": (f"{_ZERO}stage3_model_persistence_threshold", None),
    "zero_hpz_partition_size": (f"{_ZERO}zero_hpz_partition_size", 1),
    "zero_quantized_weights": (f"{_ZERO}zero_quantized_weights", False),
    "zero_quantized_nontrainable_weights": (f"{_ZERO}zero_quantized_nontrainable_weights", False),
    "zero_quantized_gradients": (f"{_ZERO}zero_quantized_gradients", False),
    "flops_profiler_recompute_fwd_factor": ("flops_profiler.recompute_fwd_factor", 0.0),
    "cpuadam_cores_perc": (f"{_ZERO}offload_optimizer.cpuadam_cores_perc", 0.9),
    "swap_tensor_config": ("aio", None),
    "tensor_parallel_config": ("tensor_parallel", None),
    "initial_dynamic_scale": ("fp16.initial_scale_power", 16),
    "prescale_gradients": ("prescale_gradients", False),
    "autotp_size": ("tensor_parallel.autotp_size", 0),
    "graph_harvesting": ("graph_harvesting", False),
    "tensorboard_enabled": ("tensorboard.enabled", False),
}
# Features that shardwell does not have: their getters say that they are off.
OFF: dict[str, Any] = {
    **dict.fromkeys(("autotuning_enabled", "curriculum_learning_enabled"), False),
    **dict.fromkeys(("data_efficiency_enabled", "data_sampling_enabled", "random_ltd_enabled"), False),
    **dict.fromkeys(
        ("is_deepcompile_enabled", "is_deepcompile_active", "super_offload", "checkpoint_writer_enabled"), False
    ),
    "checkpoint_serialization_enabled": False,
    **dict.fromkeys(("compile_autosp", "compile_autotp"), False),
    **dict.fromkeys(("amp_enabled", "eigenvalue_enabled", "pld_enabled", "curriculum_enabled_legacy"), False),
    **dict.fromkeys(("quantize_training", "elasticity_enabled"), False),
    **dict.fromkeys(("amp_params", "pld_params", "get_pld_theta", "curriculum_params_legacy"), None),
}


def read(engine: Any, key: str, default: Any) -> Any:
    """Return the value of a dotted key: in force, as the user wrote it, or DeepSpeed's default."""
    value: Any = engine.settings
    for part in key.split("."):
        if not hasattr(value, part):
            return engine.settings.inert_keys.get(key, default)
        value = getattr(value, part)
    return value


def getter(name: str, key: str, default: Any) -> Callable[[Any], Any]:
    """Return a method that reads one key."""

    def get(self: Any) -> Any:
        return read(self, key, default)

    get.__name__, get.__doc__ = name, f"Return `{key}` of the configuration."
    return get


def constant(name: str, value: Any) -> Callable[[Any], Any]:
    """Return a method that says that a feature is off."""

    def get(self: Any) -> Any:
        return value

    get.__name__, get.__doc__ = name, "Return that this is off: shardwell does not have it."
    return get


class ConfigGetters:
    """The getters of the tables above, as methods."""

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Return whether the tags of the ranks are compared, by the configuration; they always are."""
        return str(read(self, "checkpoint.tag_validation", "warn")).lower() != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Return whether different tags are an error, by the configuration; they always are."""
        return str(read(self, "checkpoint.tag_validation", "warn")).lower() == "fail"

    def zero_has_nvme_offload(self) -> bool:
        """Return whether parameters or optimizer state are on NVMe."""
        blocks = (f"{_ZERO}offload_optimizer.device", f"{_ZERO}offload_param.device")
        return any(read(self, key, "none") == "nvme" for key in blocks)

    def dynamic_loss_scale_args(self) -> dict[str, Any] | None:
        """Return the rules of a dynamic loss scale under DeepSpeed's names, or None if it is fixed or off."""
        if not read(self, "fp16.enabled", False) or read(self, "fp16.loss_scale", 0) != 0:
            return None
        return {
            "init_scale": 2 ** read(self, "fp16.initial_scale_power", 16),
            "scale_window": read(self, "fp16.loss_scale_window", 1000),
            "delayed_shift": read(self, "fp16.hysteresis", 2),
            "consecutive_hysteresis": read(self, "fp16.consecutive_hysteresis", False),
            "min_scale": read(self, "fp16.min_loss_scale", 1),
        }

    def get_parallel_world_sizes(self) -> dict[str, int]:
        """Return over how many ranks rows (`dp`) and tensors (`tp`) are split."""
        places: Any = sys.modules.get("deepspeed.utils.groups", groups)
        return {"dp": places.get_data_parallel_world_size(), "tp": places.get_tensor_model_parallel_world_size()}

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        """Return whether samples of a data set are found by their number."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        """Return whether a data set is a stream."""
        return isinstance(obj, torch.utils.data.IterableDataset)


for _name, (_key, _default) in GETTERS.items():
    setattr(ConfigGetters, _name, getter(_name, _key, _default))
for _name, _value in OFF.items():
    setattr(ConfigGetters, _name, constant(_name, _value))
