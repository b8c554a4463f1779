"""`deepspeed.checkpointing`: DeepSpeed's names over `shardwell.checkpointing`."""

from __future__ import annotations

from typing import Any

import torch

from shardwell.activation_checkpointing import checkpoint, configure, is_configured, reset
from shardwell.compat.deepspeed_api.refusal import refuse

__all__ = [
    "CheckpointFunction",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

non_reentrant_checkpoint = checkpoint
get_cuda_rng_tracker = refuse(
    "deepspeed.checkpointing",
    "get_cuda_rng_tracker",
    "random states of tensor-parallel ranks are not tracked; checkpoint() restores those of this rank",
)


class CheckpointFunction:
    """DeepSpeed's autograd function; only `apply(function, ..., *args)` is used by others."""

    @staticmethod
    def apply(function: Any, *args: Any) -> Any:
        """Call the function with its activations computed again in backward."""
        return checkpoint(function, *args)


def set_num_layers(nlayers: int) -> None:
    """Do nothing: nothing is reserved ahead."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Refuse to partition without ranks that share activations; `configure(mpu_=...)` names them."""
    if partition_activation:
        configure(partition_activations=True)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed this rank: without model parallelism all ranks have one seed."""
    torch.manual_seed(seed)
