"""`deepspeed.runtime.utils` and the names of `deepspeed.runtime.config` and `config_utils` that clients import.

Norms here are those of full gradients on this rank, as plain training has them. The norms and the clipping of a sharded
model are the engine's: `gradient_clipping` and `get_global_grad_norm`.
"""

from __future__ import annotations

import gc
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwell.compat.deepspeed_api import comm
from shardwell.compat.deepspeed_api.accelerator import get_accelerator
from shardwell.compat.deepspeed_api.config_models import (
    DeepSpeedConfigModel,
    get_config_default,
    pp_int,
)
from shardwell.compat.deepspeed_api.config_object import (
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    DEEPSPEED_OPTIMIZERS,
    LAMB_OPTIMIZER,
    LION_OPTIMIZER,
    MUON_OPTIMIZER,
    DeepSpeedConfig,
    DeepSpeedConfigError,
    DeepSpeedConfigObject,
    DeepSpeedConfigWriter,
    DtypeEnum,
    ScientificNotationEncoder,
    dict_raise_error_on_duplicate_keys,
    get_dict_param,
    get_list_param,
    get_scalar_param,
)
from shardwell.compat.deepspeed_api.logging import logger
from shardwell.errors import ShardwellError

__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "DEEPSPEED_OPTIMIZERS",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "MUON_OPTIMIZER",
    "CheckOverflow",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedConfigModel",
    "DeepSpeedConfigObject",
    "DeepSpeedConfigWriter",
    "DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable",
    "DtypeEnum",
    "DummyOptim",
    "ScientificNotationEncoder",
    "call_to_str",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "compare_tensors_in_structures",
    "copy_to_device",
    "dict_raise_error_on_duplicate_keys",
    "empty_cache",
    "ensure_directory_exists",
    "get_checkpoint_folder_size",
    "get_config_default",
    "get_dict_param",
    "get_flattened_grad_norm",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_grad_norm",
    "get_inactive_params",
    "get_list_param",
    "get_ma_status",
    "get_only_unique_item",
    "get_scalar_param",
    "get_tensor_bytes",
    "get_weight_norm",
    "has_inf_or_nan",
    "is_invalid_grad_norm",
    "is_model_parallel_parameter",
    "mask_nan_or_inf_with_val_inplace",
    "memory_status",
    "move_to_device",
    "noop_context",
    "noop_decorator",
    "partition_balanced",
    "partition_uniform",
    "pp_int",
    "prefix_sum_inc",
    "required_torch_version",
    "see_memory_usage",
    "set_random_seed",
]

DeepSpeedOptimizerCallable = Callable[..., Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], Any]

_GIB = 1 << 30


class DummyOptim:
    """An optimizer that holds parameter groups and steps nothing."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": params}]


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    return func


class noop_context:  # noqa: N801 - DeepSpeed's name
    """A context that does nothing."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Tell whether torch's version, as major.minor, is within these."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    here = (int(found[1]), int(found[2])) if found else (0, 0)
    low, high = (_version(one) for one in (min_version, max_version))
    return (low is None or here >= low) and (high is None or here <= high)


def _version(number: float | None) -> tuple[int, int] | None:
    if number is None:
        return None
    major, _, minor = str(number).partition(".")
    return int(major), int(minor or 0)


# --- files, seeds, devices --------------------------------------------------------------------------------------


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """Return the item with copies on the device of all tensors that meet the criterion."""
    return _with_tensors(item, lambda one: one.detach().clone().to(device) if criterion_func(one) else one)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return the item with all tensors, or those that meet the criterion, on the device."""
    return _with_tensors(item, lambda one: one.to(device) if criterion_func is None or criterion_func(one) else one)


def _with_tensors(item: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, Mapping):
        return {key: _with_tensors(value, change) for key, value in item.items()}
    if isinstance(item, tuple | list):
        return type(item)(_with_tensors(value, change) for value in item)
    return item


def empty_cache() -> None:
    """Give cached device memory back, and forget its peak."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory of the device and of the host on rank 0, if `force` is true."""
    if not force or comm.get_rank() != 0:
        return
    gc.collect()
    device, host = get_accelerator(), psutil.virtual_memory()
    logger.warning(
        "%s: device: %.2f GiB allocated (most %.2f), %.2f GiB reserved; host: %.2f GiB used (%.1f%%)",
        message,
        device.memory_allocated() / _GIB,
        device.max_memory_allocated() / _GIB,
        device.memory_reserved() / _GIB,
        (host.total - host.available) / _GIB,
        host.percent,
    )
    device.reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log the memory of the device on one rank; -1 is every rank."""
    rank, device = comm.get_rank(), get_accelerator()
    if print_rank not in (-1, rank):
        return
    now, most = device.memory_allocated() / _GIB, device.max_memory_allocated() / _GIB
    logger.warning("rank %d, %s: %.4f GiB allocated on the device, at most %.4f", rank, msg, now, most)
    if reset_max:
        device.reset_peak_memory_stats()


def get_ma_status() -> int:
    """Return the bytes that are allocated on the device, on rank 0; 0 elsewhere."""
    return int(get_accelerator().memory_allocated()) if comm.get_rank() == 0 else 0


# --- norms ------------------------------------------------------------------------------------------------------


def is_model_parallel_parameter(p: Any) -> bool:
    """Tell whether a parameter is marked as one part of several."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Return 1 if a tensor has inf or NaN, else 0, as a tensor."""
    return (~torch.isfinite(x)).any().float()


def is_invalid_grad_norm(norm: Any) -> bool:
    """Tell whether a norm is -1, inf or NaN."""
    return bool(norm in (-1, float("inf")) or norm != norm)


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the norm of values whose parts have these norms."""
    return float(sum(float(norm) ** 2 for norm in norm_list) ** 0.5)


def _refuse_shards(tensors: Iterable[Tensor], name: str) -> None:
    if any(type(tensor).__name__ in ("ShardedGradient", "ReleasedParameter") for tensor in tensors):
        raise ShardwellError(
            f"{name}: these belong to an engine, which holds shards of them; write gradient_clipping into the "
            "configuration, and read engine.get_global_grad_norm()"
        )


def get_grad_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of the gradients of these parameters."""
    gradients = [one.grad for one in _listed(parameters) if one.grad is not None]
    _refuse_shards(gradients, "get_grad_norm")
    return _checked(float(torch.nn.utils.get_total_norm(gradients, float(norm_type))))


def get_weight_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of these tensors; -1 if it is inf or NaN."""
    tensors = [one.data.float() for one in _listed(parameters)]
    _refuse_shards(_listed(parameters), "get_weight_norm")
    return _checked(float(torch.nn.utils.get_total_norm(tensors, float(norm_type))))


get_flattened_grad_norm = get_grad_norm


def _checked(norm: float) -> float:
    return -1.0 if norm in (float("inf"), -float("inf")) or norm != norm else norm


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> Tensor:
    """Scale gradients so that their norm is at most `max_norm`; return the norm before.

    Ranks scale alike: the norm is averaged over them, as DeepSpeed does.
    """
    chosen = [one for one in _listed(parameters) if one.grad is not None]
    _refuse_shards([one.grad for one in chosen if one.grad is not None], "clip_grad_norm_")
    norm = torch.nn.utils.get_total_norm([one.grad for one in chosen if one.grad is not None], float(norm_type))
    if comm.get_world_size() > 1:
        norm = norm / comm.get_world_size()
        comm.all_reduce(norm)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for one in chosen:
        assert one.grad is not None
        one.grad.detach().mul_(factor.to(one.grad.device))
    return norm


def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor], norm_type: float = 2, mpu: Any = None, **_groups: Any
) -> float:
    """Return the norm of all these tensors together; -1 if it is inf or NaN."""
    return get_weight_norm(input_tensors, norm_type)


def clip_tensors_by_global_norm(
    input_tensors: Sequence[Tensor],
    max_norm: float = 1.0,
    global_norm: float | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> float:
    """Scale tensors so that their norm is at most `max_norm`; return the norm before."""
    norm = get_global_norm_of_tensors(input_tensors) if global_norm is None else global_norm
    factor = max_norm / (norm + eps)
    if factor < 1:
        for tensor in input_tensors:
            tensor.detach().mul_(factor)
    return norm


def mask_nan_or_inf_with_val_inplace(input: Tensor, device: Any = None, val: float = -1.0) -> None:
    """Replace inf and NaN by a value."""
    input.masked_fill_(~torch.isfinite(input), val)


class CheckOverflow:
    """A check of gradients for inf and NaN, on all ranks."""

    def __init__(
        self, param_groups: Any = None, mpu: Any = None, zero_reduce_scatter: bool = False, deepspeed: Any = None
    ) -> None:
        self.mpu = mpu
        self.params = [one for group in param_groups or () for one in group] if param_groups else None

    def check_using_norm(self, norm_group: Iterable[float], reduce_overflow: bool = True) -> bool:
        """Tell whether a norm says inf or NaN: it is -1, inf or NaN."""
        mine = any(is_invalid_grad_norm(float(norm)) for norm in norm_group)
        return self._of_all(mine) if reduce_overflow else mine

    def check(self, param_groups: Any = None) -> bool:
        """Tell whether a gradient of these, or of the constructor's parameters, has inf or NaN on any rank."""
        chosen = self.params if param_groups is None else [one for group in param_groups for one in group]
        if chosen is None:
            raise AssertionError("CheckOverflow has no parameters: pass them to its constructor or to check()")
        return self.has_overflow(chosen)

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Tell whether a gradient on this rank has inf or NaN."""
        return any(bool(has_inf_or_nan(one.grad)) for one in params if one.grad is not None)

    def has_overflow(self, params: Iterable[Tensor], has_moe_params: bool | None = None) -> bool:
        """Tell whether a gradient on any rank has inf or NaN."""
        return self._of_all(self.has_overflow_serial(params))

    @staticmethod
    def _of_all(mine: bool) -> bool:
        if comm.get_world_size() == 1:
            return mine
        found = torch.tensor([float(mine)], device=get_accelerator().current_device_name())
        comm.all_reduce(found, op=comm.ReduceOp.MAX)
        return bool(found.item())


# --- parts ------------------------------------------------------------------------------------------------------


def prefix_sum_inc(weights: Sequence[int]) -> list[int]:
    """Return the sums of the first 1, 2, ... weights."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return where each part begins, and the end, of parts whose sizes differ by one at most."""
    small, rest = divmod(num_items, num_parts)
    sizes = [small + (part < rest) for part in range(num_parts)]
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    return [0, *accumulate(sizes)]


def partition_balanced(weights: Sequence[int], num_parts: int) -> list[int]:
    """Return where each part begins, and the end, of parts whose heaviest one is as light as possible.

    No part is empty, and among these the others are as even as they can be.
    """
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    sums = [0, *accumulate(weights)]
    limit = _best(sums, num_parts, max, float("inf"))[0]
    return _best(sums, num_parts, lambda before, load: before + load * load, limit)[1]


def _best(
    sums: Sequence[float], num_parts: int, join: Callable[[float, float], float], limit: float
) -> tuple[float, list[int]]:
    """Return the least cost of parts that have items and weigh no more than `limit`, and where they begin and end."""
    num_items = len(sums) - 1
    row: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for part in range(1, num_parts + 1):
        before, row = row, {}
        for end in range(part, num_items - (num_parts - part) + 1):
            fitting = [
                (join(cost, sums[end] - sums[begin]), begins)
                for begin, (cost, begins) in before.items()
                if begin < end and sums[end] - sums[begin] <= limit
            ]
            if fitting:
                cost, begins = min(fitting, key=lambda one: one[0])
                row[end] = cost, [*begins, end]
    return row[num_items]


# --- small things -----------------------------------------------------------------------------------------------


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as text: call_to_str("f", 1, a=2) is "f(1, a=2)"."""
    words = [repr(one) for one in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{base}({', '.join(words)})"


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the value that all items have."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected items that are all alike, found {found}")
    return found.pop()


def get_tensor_bytes(item: Any) -> int:
    """Return the bytes of all tensors in an item."""
    if isinstance(item, Tensor):
        return item.numel() * item.element_size()
    inner = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()
    return sum(get_tensor_bytes(one) for one in inner)


def get_inactive_params(param_list: Iterable[Any]) -> list[Any]:
    """Return the parameters whose values are not in memory on this rank."""
    return [one for one in param_list if type(one).__name__ == "ReleasedParameter"]


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Tell whether two lists or dictionaries have equal tensors at the same places."""
    if isinstance(inputs1, Tensor) or isinstance(inputs2, Tensor):
        both = isinstance(inputs1, Tensor) and isinstance(inputs2, Tensor)
        return both and torch.equal(inputs1, inputs2.to(inputs1.device))
    if isinstance(inputs1, Mapping) and isinstance(inputs2, Mapping):
        alike = inputs1.keys() == inputs2.keys()
        return alike and all(compare_tensors_in_structures(inputs1[key], inputs2[key]) for key in inputs1)
    if isinstance(inputs1, list | tuple) and isinstance(inputs2, list | tuple):
        pairs = zip(inputs1, inputs2, strict=False)
        return len(inputs1) == len(inputs2) and all(compare_tensors_in_structures(*pair) for pair in pairs)
    return bool(inputs1 == inputs2)


def get_checkpoint_folder_size(save_dir: str, tag: str, local_rank: int | None = None) -> int:
    """Return the bytes of a checkpoint's folder."""
    folder = os.path.join(save_dir, tag)
    return sum(one.stat().st_size for one in Path(folder).rglob("*") if one.is_file())
