"""`deepspeed.utils.groups`: who shares what with whom.

Tensor, sequence and pipeline parallelism have size 1, unless the user's own `mpu` object says otherwise, or an engine
with such axes: the last one that was made answers. What would need other groups is refused.
"""

from __future__ import annotations

import functools
from typing import Any

from shardwell.compat.deepspeed_api import comm
from shardwell.compat.deepspeed_api.model_parallel_unit import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)
from shardwell.errors import ShardwellError

mpu: Any = None  # what knows about model parallelism, the user's object or the grid of an engine, or None
mesh_device: Any = None  # a DeviceMesh with the dimensions data_parallel and sequence_parallel, or None
expert_tensor_parallel_world_size = 1


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Take note of the user's `mpu`; there is no expert parallelism."""
    if ep_size != 1:
        raise _no_experts(f"groups.initialize(ep_size={ep_size})")
    globals()["mpu"] = mpu


def _no_experts(asked: str) -> ShardwellError:
    return ShardwellError(f"{asked}: expert parallelism is the key shardwell.expert_parallel_size; use 1 here")


def __getattr__(name: str) -> Any:
    if "expert" in name or "all_to_all" in name or "zero_param" in name:
        feature = "hpZ groups" if "zero_param" in name else "groups of experts"
        way_out = "zero_hpz_partition_size makes them inside the engine" if "zero_param" in name else "use ep_size 1"
        raise AttributeError(f"deepspeed.utils.groups.{name}: there are no {feature} to ask for; {way_out}")
    raise AttributeError(f"deepspeed.utils.groups has no {name!r} here")


def _ask(name: str, default: Any) -> Any:
    """Return what the user's `mpu` answers, or else the default."""
    return getattr(mpu, name)() if mpu is not None and hasattr(mpu, name) else default


@functools.cache
def _alone(world: int, rank: int) -> Any:
    """Return a group with this rank alone; every rank makes all of them, as torch demands."""
    made = [comm.new_group([one]) for one in range(world)]
    return made[rank]


def _group_of_one() -> Any:
    if comm.get_world_size() == 1:
        return comm.get_world_group()
    return _alone(comm.get_world_size(), comm.get_rank())


# --- data parallelism: all ranks --------------------------------------------------------------------------------


def _get_data_parallel_group() -> Any:
    """Return the group of all ranks that see different data."""
    if mesh_device is not None:
        return mesh_device.get_group(mesh_dim="data_parallel")
    return _ask("get_data_parallel_group", comm.get_world_group() if comm.is_initialized() else None)


def _clone_world_group() -> Any:
    """Return the group of all ranks."""
    return comm.get_world_group()


def _get_data_parallel_world_size() -> int:
    if mesh_device is not None:
        return comm.get_world_size(_get_data_parallel_group())
    return int(_ask("get_data_parallel_world_size", comm.get_world_size()))


def _get_data_parallel_rank() -> int:
    if mesh_device is not None:
        return comm.get_rank(_get_data_parallel_group())
    return int(_ask("get_data_parallel_rank", comm.get_rank()))


def _get_data_parallel_group_ranks() -> Any:
    return _ask("get_data_parallel_group_ranks", range(comm.get_world_size()))


def _get_broadcast_src_rank() -> int:
    """Return the rank whose values the others take."""
    group = _get_sequence_data_parallel_group()
    return 0 if group is None else comm.get_global_rank(group, 0)


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank


# --- sequence parallelism ---------------------------------------------------------------------------------------


def _get_sequence_parallel_world_size() -> int:
    if mesh_device is not None:
        return comm.get_world_size(_get_sequence_parallel_group())
    return int(_ask("get_sequence_parallel_world_size", 1))


def _get_sequence_parallel_rank() -> int:
    if mesh_device is not None:
        return comm.get_rank(_get_sequence_parallel_group())
    return int(_ask("get_sequence_parallel_rank", 0))


def _get_sequence_parallel_group() -> Any:
    """Return the group of ranks that share a sequence; a KeyError, as DeepSpeed has it, if there is none."""
    if mesh_device is not None:
        return mesh_device.get_group(mesh_dim="sequence_parallel")
    if mpu is None or not hasattr(mpu, "get_sequence_parallel_group"):
        raise KeyError("no ranks share a sequence: sequence parallelism is off, and its size is 1")
    return mpu.get_sequence_parallel_group()


def _get_sequence_data_parallel_world_size() -> int:
    return int(_ask("get_sequence_data_parallel_world_size", comm.get_world_size()))


def _get_sequence_data_parallel_rank() -> int:
    return int(_ask("get_sequence_data_parallel_rank", comm.get_rank()))


def _get_sequence_data_parallel_group() -> Any:
    return _ask("get_sequence_data_parallel_group", comm.get_world_group() if comm.is_initialized() else None)


# --- tensor parallelism -----------------------------------------------------------------------------------------


def _get_model_parallel_world_size() -> int:
    return int(_ask("get_model_parallel_world_size", 1))


def get_model_parallel_rank() -> int:
    return int(_ask("get_model_parallel_rank", 0))


def get_model_parallel_group() -> Any:
    """Return the group of ranks that share a model: this rank alone, unless the user's `mpu` says otherwise."""
    return _ask("get_model_parallel_group", None) or _group_of_one()


def get_tensor_model_parallel_world_size() -> int:
    return int(bwc_tensor_model_parallel_world_size(mpu))


def get_tensor_model_parallel_rank() -> int:
    return int(bwc_tensor_model_parallel_rank(mpu))


def get_tensor_model_parallel_group() -> Any:
    """Return the group of ranks that share each tensor: this rank alone, unless an engine or `mpu` says otherwise."""
    return bwc_tensor_model_parallel_group(mpu) or _group_of_one()


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first of the ranks that share tensors with this one."""
    return int(comm.get_global_rank(get_tensor_model_parallel_group(), 0))


get_model_parallel_world_size = _get_model_parallel_world_size


def _create_model_parallel(model_parallel_size_: int) -> tuple[Any, Any]:
    """Return the data-parallel and the model-parallel group; only a size of 1 is supported."""
    if model_parallel_size_ != 1:
        raise ShardwellError(
            f"_create_model_parallel({model_parallel_size_}): tensor parallelism is not supported yet; use 1"
        )
    return _get_data_parallel_group(), _group_of_one()


# --- experts ----------------------------------------------------------------------------------------------------


def _get_max_expert_size() -> int:
    return 1


def _get_expert_model_parallel_world_size() -> int:
    return expert_tensor_parallel_world_size


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    return {}


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    return {}


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, mp_size: int = 1, pp_size: int = 1, **_options: Any
) -> None:
    """Refuse groups of experts; a size of 1 needs none."""
    if expert_parallel_size_ != 1:
        raise _no_experts(f"_create_expert_and_data_parallel({expert_parallel_size_})")


def _zero_param_parallel_is_initialized() -> bool:
    return False


class _DivisionError(AssertionError, ValueError):
    """A division by zero: DeepSpeed's versions raise either."""


def _ensure_divisibility(numerator: int, denominator: int) -> None:
    if denominator == 0:
        raise _DivisionError(f"denominator must be non-zero, to divide {numerator}")
    if numerator % denominator:
        raise AssertionError(f"{numerator} is not divisible by {denominator}")


def _get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return who would share experts, and who would hold copies of them; a computation, for which no group is made."""
    model_size = tensor_parallel_size_ * pipeline_parallel_size_
    _ensure_divisibility(world_size, model_size)
    data_size = world_size // model_size
    _ensure_divisibility(data_size, expert_parallel_size_)
    per_stage = world_size // pipeline_parallel_size_
    first_of_rows = [
        begin + place for begin in range(0, world_size, per_stage) for place in range(tensor_parallel_size_)
    ]
    together, copies = [], []
    for first in first_of_rows:
        row = [first + number * tensor_parallel_size_ for number in range(data_size)]
        if use_data_before_expert_parallel_:
            stride = data_size // expert_parallel_size_
            row = [row[number] for begin in range(stride) for number in range(begin, data_size, stride)]
        parts = [row[begin : begin + expert_parallel_size_] for begin in range(0, data_size, expert_parallel_size_)]
        together += parts
        copies += [list(column) for column in zip(*parts, strict=True)]
    return together, copies
