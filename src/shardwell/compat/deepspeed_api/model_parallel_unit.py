"""`deepspeed.utils.bwc`: what an `mpu` object says about model parallelism, in the spelling that it has."""

from __future__ import annotations

from typing import Any

__all__ = [
    "bwc_pipeline_parallel_group",
    "bwc_pipeline_parallel_world_size",
    "bwc_tensor_model_parallel_group",
    "bwc_tensor_model_parallel_rank",
    "bwc_tensor_model_parallel_world_size",
]

_TENSOR = ("tensor_model_parallel", "slice_parallel", "model_parallel")  # Megatron's newer and older names
_PIPELINE = ("pipeline_model_parallel", "pipe_parallel")


def _ask(mpu: Any, kinds: tuple[str, ...], what: str, otherwise: Any) -> Any:
    """Return the answer of the first method that the object has; without one there is no such parallelism."""
    for kind in kinds:
        method = getattr(mpu, f"get_{kind}_{what}", None)
        if method is not None:
            return method()
    return otherwise


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> Any:
    """Return the rank among those that share tensors."""
    return _ask(mpu, _TENSOR, "rank", 0)


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> Any:
    """Return the number of ranks that share tensors."""
    return _ask(mpu, _TENSOR, "world_size", 1)


def bwc_tensor_model_parallel_group(mpu: Any = None) -> Any:
    """Return the group of ranks that share tensors, or None."""
    return _ask(mpu, _TENSOR, "group", None)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> Any:
    """Return the number of stages of a pipeline."""
    return _ask(mpu, _PIPELINE, "world_size", 1)


def bwc_pipeline_parallel_group(mpu: Any = None) -> Any:
    """Return the group of ranks that form a pipeline, or None."""
    return _ask(mpu, _PIPELINE, "group", None)
