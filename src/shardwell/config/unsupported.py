"""What a configuration file may ask for and shardwell does not do, as data: a sentence for each key.

Three kinds, three wordings: not built yet, removed for good, and known under another name.
`load` reads these tables; nothing here looks at a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwell.version import __version__


def _not_yet(what: str, remedy: str) -> str:
    return f"shardwell {__version__} does not have {what} yet; {remedy}"


def _removed(what: str, remedy: str = "remove the key") -> str:
    return f"removed, and will not come to shardwell ({what}); {remedy}"


@dataclass(frozen=True)
class Only:
    """A key that is read, but has only these values for now, and why."""

    allowed: tuple[Any, ...]
    why: str


_OFF = "set it to false or remove it"

ONLY: dict[str, Only] = {
    "wall_clock_breakdown": Only((False,), _not_yet("a wall clock breakdown", f"{_OFF}, and use torch.profiler")),
    "torch_autocast.lower_precision_safe_modules": Only(
        (None,), _not_yet("a choice of modules for autocast", "remove it: torch's own list of operations decides")
    ),
    "activation_checkpointing.profile": Only((False,), _not_yet("a profile of recomputation", _OFF)),
    "checkpoint.use_node_local_storage": Only(
        (False,), _not_yet("checkpoints on disks of single nodes", f"{_OFF}, and save to a folder that all nodes see")
    ),
    "zero_optimization.reduce_scatter": Only(
        (True,), "shardwell always reduces by scatter; set it to true or remove it"
    ),
    "zero_optimization.stage3_module_granularity_threshold": Only(
        (0,), _not_yet("units by granularity", "use 0 or remove it, and name units in leaf_module")
    ),
    "aio.use_gds": Only((False,), _not_yet("reads from drives straight to the GPU", _OFF)),
}

_DROP = 'remove the block, or set "enabled": false in it'

# Accepted when empty or when they switch themselves off.
NOT_YET_BLOCKS: dict[str, str] = {
    "flops_profiler": _not_yet("a FLOPs profiler", _DROP),
    "tensorboard": _not_yet("a TensorBoard writer", _DROP),
    "wandb": _not_yet("a Weights & Biases writer", _DROP),
    "csv_monitor": _not_yet("a CSV writer", _DROP),
    "comms_logger": _not_yet("a communication log", _DROP),
    "pipeline": _not_yet("pipeline parallelism", _DROP),
    "tensor_parallel": _not_yet("tensor parallelism", _DROP),
    "autotuning": _not_yet("autotuning", _DROP),
}

REMOVED: dict[str, str] = {
    "elasticity": _removed("elasticity", "remove the block"),
    "amp": _removed("Apex amp", "use bf16.enabled"),
    "curriculum_learning": _removed("curriculum learning", "order the samples in your own DataLoader"),
    "compression_training": _removed("compression training", "remove the block"),
    "sparse_attention": _removed("sparse attention", "use torch.nn.attention.flex_attention in the model"),
    "nebula": _removed("Nebula checkpoints", "remove the block"),
    "progressive_layer_drop": _removed("progressive layer drop", "remove the block"),
    "quantize_training": _removed("quantized training (MoQ)", "remove the block"),
    "zero_optimization.mics_shard_size": _removed("MiCS"),
    "zero_optimization.mics_hierarchical_params_gather": _removed("MiCS"),
    "zero_optimization.zeropp_loco_param": _removed("LoCo"),
    "zero_optimization.elastic_checkpoint": _removed("the elastic checkpoint switch"),
    "zero_optimization.load_from_fp32_weights": _removed("the choice of weights to resume from"),
    "zero_optimization.legacy_stage1": _removed("the legacy form of stage 1"),
}

REMOVED_OPTIMIZERS: dict[str, str] = {
    name: _removed("1-bit optimizers", "use AdamW or another optimizer of torch")
    for name in ("onebitadam", "zerooneadam", "onebitlamb")
}

# Old spelling -> what to write instead.
RENAMED: dict[str, str] = {
    "aio.thread_count": "aio.intra_op_parallelism",
    "bfloat16": "bf16",
    "fp32_allreduce": 'communication_data_type: "fp32"',
    "allgather_size": "zero_optimization.allgather_bucket_size",
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer.device",
    "zero_optimization.cpu_offload_params": "zero_optimization.offload_param.device",
    "zero_optimization.cpu_offload_use_pin_memory": "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
}
