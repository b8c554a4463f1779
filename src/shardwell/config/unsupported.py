"""What a configuration file may ask for and shardwell does not do, as data: a sentence for each key.

Two wordings: not built yet, and removed for good. What asks for nothing, because it is off or because shardwell does it
anyway, is accepted. `load` reads these tables; nothing here looks at a file.
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
# Kinds of modules whose parameters DeepSpeed sends in the lower precision if nobody says otherwise.
_LOWER = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")

ONLY: dict[str, Only] = {
    "torch_autocast.lower_precision_safe_modules": Only(
        (None, _LOWER),
        _not_yet("a choice of modules for autocast", "remove it: torch's own list of operations decides"),
    ),
    "checkpoint.use_node_local_storage": Only(
        (False,), _not_yet("checkpoints on disks of single nodes", f"{_OFF}, and save to a folder that all nodes see")
    ),
    "aio.use_gds": Only((False,), _not_yet("reads from drives straight to the GPU", _OFF)),
}

_DROP = 'remove the block, or set "enabled": false in it'


@dataclass(frozen=True)
class Feature:
    """A block for something that is not there: refused if it asks for it, and accepted if it does not."""

    refusal: str
    switches: tuple[str, ...] = ("enabled",)  # any of them on, or above 1 where it counts, asks for it
    is_deep: bool = False  # switches may stand in blocks inside
    is_asked_by_content: bool = False  # whatever stands in it asks for it, unless a switch is off


FEATURES: dict[str, Feature] = {
    "flops_profiler": Feature(_not_yet("a FLOPs profiler", _DROP)),
    "tensorboard": Feature(_not_yet("a TensorBoard writer", _DROP)),
    "wandb": Feature(_not_yet("a Weights & Biases writer", _DROP)),
    "comet": Feature(_not_yet("a Comet writer", _DROP)),
    "csv_monitor": Feature(_not_yet("a CSV writer", _DROP)),
    "comms_logger": Feature(_not_yet("a communication log", f"{_DROP}; engine.traffic() counts bytes")),
    "pipeline": Feature(_not_yet("pipeline parallelism", "remove the block"), ("enabled", "stages")),
    "tensor_parallel": Feature(
        _not_yet("tensor parallelism", "remove the block, or set autotp_size to 0"),
        ("enabled", "autotp_size", "tp_size"),
    ),
    "expert_parallel": Feature(_not_yet("expert parallelism", _DROP)),
    "autotuning": Feature(_not_yet("autotuning", _DROP)),
    "hybrid_engine": Feature(_not_yet("an engine for inference beside training", _DROP)),
    "compile": Feature(
        _not_yet("DeepCompile", 'remove the block, or set "deepcompile": false, and call engine.compile()'),
        ("enabled", "deepcompile", "offload_activation"),
    ),
    "datastates": Feature(
        _not_yet("DataStates checkpoints", "remove the block; shardwell.async_save writes in the background"),
        is_asked_by_content=True,
    ),
    "zero_optimization.zenflow": Feature(_not_yet("ZenFlow", "remove the block"), is_asked_by_content=True),
    "elasticity": Feature(_removed("elasticity", f"{_DROP}; checkpoints load at any number of ranks")),
    "amp": Feature(_removed("Apex amp", "use bf16.enabled")),
    "curriculum_learning": Feature(_removed("curriculum learning", "order the samples in your own DataLoader")),
    "data_efficiency": Feature(_removed("the data efficiency library", _DROP)),
    "compression_training": Feature(_removed("compression training", "remove the block"), is_deep=True),
    "weight_quantization": Feature(
        _removed("quantized inference", "use zero_quantized_nontrainable_weights"), is_asked_by_content=True
    ),
    "sparse_attention": Feature(
        _removed("sparse attention", "use torch.nn.attention.flex_attention in the model"), is_asked_by_content=True
    ),
    "nebula": Feature(_removed("Nebula checkpoints", "remove the block")),
    "progressive_layer_drop": Feature(_removed("progressive layer drop", "remove the block")),
    "quantize_training": Feature(_removed("quantized training (MoQ)", "remove the block"), is_asked_by_content=True),
    "eigenvalue": Feature(_removed("eigenvalues for quantized training", "remove the block")),
    "zero_optimization.zeropp_loco_param": Feature(
        _removed("LoCo", "remove the key; shardwell.codecs.feedback keeps what codes lose"), is_asked_by_content=True
    ),
}


@dataclass(frozen=True)
class Idle:
    """A key outside the schema with values that change nothing here, and what is said of other values."""

    why: str  # it has no effect
    values: tuple[Any, ...] | None = None  # None: any
    refusal: str = ""


_NO_SCALE = "bf16 needs no loss scale"
_SIXTEEN = _not_yet("16-bit masters and optimizer state", f'{_OFF}; shardwell.moments "8bit" saves host memory')

IDLE: dict[str, Idle] = {
    "dump_state": Idle("`shardwell config` and engine.config show what is in force"),
    "memory_breakdown": Idle("engine.memory() tells it at any time"),
    "disable_allgather": Idle("parameters are always all-gathered"),
    "graph_harvesting": Idle("use engine.compile()"),
    "vocabulary_size": Idle("nothing depends on it"),
    "disable_python_gc": Idle("call gc.disable() in the script"),
    "log_level": Idle("set the level of the logger shardwell"),
    "timers": Idle("nothing is timed; use torch.profiler"),
    "seq_parallel_communication_data_type": Idle("there is no sequence parallelism"),
    "seq_parallel_comm_data_type": Idle("there is no sequence parallelism"),
    "use_data_before_expert_parallelism": Idle("there is no expert parallelism"),
    "dataloader_drop_last": Idle("what does not fill a micro-batch at the end of an epoch is always dropped"),
    "sequence_parallel_size": Idle("", (1, None), _not_yet("sequence parallelism", "use 1 or remove it")),
    "sparse_gradients": Idle("", (False,), _not_yet("sparse gradients", f"{_OFF}, and make embeddings dense")),
    "gradient_allreduce_op": Idle(
        "", ("mean",), 'shardwell averages gradients over the ranks; use "mean", and multiply the loss for a sum'
    ),
    "managed_gradient_accumulation": Idle(
        "", (True,), "set it to true, and call engine.set_gradient_accumulation_boundary() to decide by yourself"
    ),
    "optimizer.legacy_fusion": Idle("torch's fused kernels are used where there are some"),
    "fp16.fused_mode": Idle("torch's fused kernels are used where there are some"),
    "fp16.fp16_master_weights_and_grads": Idle("", (False,), _SIXTEEN),
    "fp16_master_weights_and_grads": Idle("", (False,), _SIXTEEN),
    "bf16.immediate_grad_update": Idle("gradients are taken as soon as they are made"),
    "bf16.check_grad_overflow": Idle("every step checks that gradients are finite; see shardwell.nonfinite"),
    "bf16.bf16_master_weights_and_grads": Idle("", (False,), _SIXTEEN),
    "bf16.bf16_optimizer_states": Idle("", (False,), _SIXTEEN),
    "bf16.auto_cast": Idle("floating inputs are always cast"),
    "bf16.loss_scale": Idle(_NO_SCALE, (0, 1), f"{_NO_SCALE}; use 1 or remove it"),
    **{
        f"bf16.{name}": Idle(_NO_SCALE)
        for name in (
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        )
    },
    "data_types.param_dtype": Idle("", (None,), _not_yet("a dtype for parameters alone", "use the bf16 or fp16 block")),
    "data_types.buffer_dtype": Idle("", (None,), _not_yet("a dtype for buffers", "cast them in the model")),
    "checkpoint.checkpoint_serialization": Idle("nothing is pickled"),
    "checkpoint.writer": Idle("", (None, {}), _not_yet("a choice of writers", "remove it; all ranks write at once")),
    "zero_optimization.mics_shard_size": Idle(
        "", (-1, 0, None), _removed("MiCS", "use zero_hpz_partition_size, or -1 here")
    ),
    "zero_optimization.mics_hierarchical_params_gather": Idle("", (False,), _removed("MiCS", _OFF)),
    "zero_optimization.elastic_checkpoint": Idle("every checkpoint loads at any number of ranks"),
    "zero_optimization.load_from_fp32_weights": Idle(
        "", (True,), _removed("the choice of weights to resume from", "masters are exact; set it to true or remove it")
    ),
    "zero_optimization.legacy_stage1": Idle("", (False,), _removed("the legacy form of stage 1", _OFF)),
    "zero_optimization.memory_efficient_linear": Idle("linear layers stay torch's own"),
    "zero_optimization.pipeline_loading_checkpoint": Idle("each rank reads only what it holds"),
    "zero_optimization.override_module_apply": Idle("nothing of torch is patched"),
    "zero_optimization.log_trace_cache_warnings": Idle("there is no trace that could be invalid"),
    "zero_optimization.enable_sanity_checks": Idle("what ranks do is always compared"),
    "zero_optimization.compute_grad_norm": Idle("the norm is always computed: it shows gradients that are not finite"),
    "zero_optimization.parameter_alignment": Idle("all parameters but those of odd sizes start aligned"),
    "zero_optimization.use_multi_rank_bucket_allreduce": Idle("one reduction per unit"),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": Idle("one gather per unit"),
    "zero_optimization.use_all_reduce_for_fetch_params": Idle("one gather per unit"),
    "zero_optimization.stage3_allgather_sequential": Idle("one gather per unit, without a copy into a bucket"),
    "zero_optimization.allgather_sequential": Idle("one gather per unit, without a copy into a bucket"),
    "zero_optimization.stage3_partition_stream_chunk_size": Idle("parameters are split one by one as they are made"),
    "zero_optimization.partition_stream_chunk_size": Idle("parameters are split one by one as they are made"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": Idle("the momentum rests where the other state does"),
    "zero_optimization.cpu_offload_use_pin_memory": Idle("what travels is always pinned"),
    "zero_optimization.offload_optimizer.super_offload": Idle("updates always run beside the backward"),
    "zero_optimization.offload_optimizer.superoffload": Idle("updates always run beside the backward"),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": Idle("updates take the cores near the GPU"),
    "zero_optimization.offload_optimizer.convert_grad_on_cpu": Idle("kernels convert on the way"),
}

REMOVED_OPTIMIZERS: dict[str, str] = {
    name: _removed("1-bit optimizers", "use AdamW or another optimizer of torch")
    for name in ("onebitadam", "zerooneadam", "onebitlamb")
}
