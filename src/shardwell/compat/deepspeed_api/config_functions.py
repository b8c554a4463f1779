"""The functions of `deepspeed.runtime.config` that read one key of a configuration, with DeepSpeed's default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# name of the function: the key, dotted, and DeepSpeed's default
READERS: dict[str, tuple[str, Any]] = {
    "get_gradient_clipping": ("gradient_clipping", 1.0),
    "get_gradient_accumulation_steps": ("gradient_accumulation_steps", None),
    "get_train_batch_size": ("train_batch_size", None),
    "get_train_micro_batch_size_per_gpu": ("train_micro_batch_size_per_gpu", None),
    "get_steps_per_print": ("steps_per_print", None),
    "get_prescale_gradients": ("prescale_gradients", False),
    "get_gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "get_sparse_gradients_enabled": ("sparse_gradients", False),
    "get_dump_state": ("dump_state", False),
    "get_wall_clock_breakdown": ("wall_clock_breakdown", False),
    "get_memory_breakdown": ("memory_breakdown", False),
    "get_zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "get_zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
    "get_dataloader_drop_last": ("dataloader_drop_last", False),
    "get_optimizer_name": ("optimizer.type", None),
    "get_optimizer_params": ("optimizer.params", None),
    "get_scheduler_name": ("scheduler.type", None),
    "get_scheduler_params": ("scheduler.params", None),
    "get_pld_enabled": ("progressive_layer_drop.enabled", False),
    "get_amp_enabled": ("amp.enabled", False),
}

__all__ = sorted(READERS)


def _reader(name: str, key: str, default: Any) -> Callable[[Mapping[str, Any]], Any]:
    def get(param_dict: Mapping[str, Any]) -> Any:
        value: Any = param_dict
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    get.__name__, get.__doc__ = name, f"Return `{key}` of a configuration, or DeepSpeed's default."
    return get


globals().update({_name: _reader(_name, *_row) for _name, _row in READERS.items()})
