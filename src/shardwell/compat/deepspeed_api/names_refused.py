"""Reasons: what DeepSpeed has and shardwell does not, and the modules that are refused as a whole.

Each name of such a module can be imported, and its use raises the reason.
"""

from __future__ import annotations

INFERENCE = "shardwell trains; serve the exported model (`shardwell checkpoint export`) with an inference server"
PIPELINE = 'the schedules of pipelines are "pipeline": {"schedule": ...}: gpipe, 1f1b, interleaved and zb-h1'
MOE = 'experts of the model are shared by ranks with "shardwell": {"expert_parallel_size": N}; use its own layers'
MODEL_PARALLEL = "tensor parallelism is the block tensor_parallel of the configuration; layers are not replaced by hand"
SEQUENCE = (
    "sequence parallelism is sequence_parallel_size in the configuration, with DistributedAttention or Transformers"
)
TILED = "shardwell.zero.TiledLinear computes in tiles; the loss over parts is shardwell.sequence_parallel.cross_entropy"
KERNELS = "there are no fused layers; use the model's own, and engine.compile() for speed"
ONE_OPTIMIZER = "one optimizer serves all stages and precisions; it is engine.optimizer"
_COMPRESSION = "there is no compression of models during training"
_FILES = "shardwell writes its checkpoints itself, with `shardwell.async_save` in the background"
_OPERATIONS = "shardwell loads its own kernels, built or not; nothing is compiled at run time"
_DATA = "the order of data is the data loader's; curricula and token dropping are not offered"
_EMBEDDED = "the engine's own schedule does this; nothing is to be imported for it"

WHOLE_MODULES: dict[str, str] = {
    "deepspeed.inference": INFERENCE,
    "deepspeed.model_implementations": INFERENCE,
    "deepspeed.module_inject": MODEL_PARALLEL,
    "deepspeed.runtime.tensor_parallel": MODEL_PARALLEL,
    "deepspeed.runtime.sequence_parallel": SEQUENCE,
    "deepspeed.runtime.domino": MODEL_PARALLEL,
    "deepspeed.sequence": SEQUENCE,
    "deepspeed.runtime.pipe": PIPELINE,
    "deepspeed.pipe": PIPELINE,
    "deepspeed.moe": MOE,
    "deepspeed.compression": _COMPRESSION,
    "deepspeed.runtime.weight_quantizer": _COMPRESSION,
    "deepspeed.linear": "there are no LoRA layers of DeepSpeed's; PEFT's adapters train at all stages",
    "deepspeed.autotuning": '"auto" in the configuration measures what can be chosen',
    "deepspeed.elasticity": "checkpoints load at any number of ranks; `shardwell run --min-ranks` goes on with fewer",
    "deepspeed.nvme": "`shardwell doctor` measures drives",
    "deepspeed.io": _FILES,
    "deepspeed.datastates": _FILES,
    "deepspeed.runtime.checkpoint_engine": _FILES,
    "deepspeed.runtime.model_checkpointing": _FILES,
    "deepspeed.checkpoint": "checkpoints load at any number of ranks; `shardwell checkpoint` converts others",
    "deepspeed.ops.aio": _OPERATIONS,
    "deepspeed.ops.gds": _OPERATIONS,
    "deepspeed.ops.transformer": KERNELS,
    "deepspeed.ops.triton_ops": KERNELS,
    "deepspeed.ops.fp_quantizer": "quantised values are zero_quantized_weights and its relatives in the configuration",
    "deepspeed.ops.quantizer": "quantised values are zero_quantized_weights and its relatives in the configuration",
    "deepspeed.ops.random_ltd": _DATA,
    "deepspeed.ops.deepspeed4science": KERNELS,
    "deepspeed.ops.pin_memory": _EMBEDDED,
    "deepspeed.ops.compile": _EMBEDDED,
    "deepspeed.runtime.data_pipeline": _DATA,
    "deepspeed.runtime.zenflow": "ZenFlow applies a part of the gradients late; `shardwell.commit` overlaps updates",
    "deepspeed.runtime.superoffload": "offload_optimizer with `shardwell.commit` overlaps the updates",
    "deepspeed.runtime.swap_tensor": "parameters and states go to drives by the offload blocks of the configuration",
    "deepspeed.runtime.rollout": "generation is deepspeed.zero.unwrap_model_for_generation",
    "deepspeed.runtime.hybrid_engine": "generation is deepspeed.zero.unwrap_model_for_generation",
    "deepspeed.runtime.comm": _EMBEDDED,
    "deepspeed.compile": "engine.compile() compiles the units with torch.compile",
}
