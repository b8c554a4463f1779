"""DeepSpeed's configuration keys that are not fields of the schema: one row each, with the reason.

A row says that a key is inert (`Inert`), that only some of its values are accepted (`Limited`), that its block asks
for a feature that shardwell does not have (`Unsupported`), or that it is an old name of another key (`Renamed`,
`Switch`). This module is data: `shardwell.config` reads files, checks values and writes the messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shardwell.version import __version__

# Names of the types in `shardwell.config.field_types` that values of a row are checked with.
ValueType = Literal["any", "flag", "count", "size", "strings", "flags by name", "tag validation"]


@dataclass(frozen=True)
class Inert:
    """A key that is accepted and changes nothing."""

    reason: str
    type: ValueType = "any"
    default: Any = None  # a false default in a file is not worth a note
    accepts_auto: bool = False
    promises_output: bool = False  # set to true, it makes the user wait for output that never comes


@dataclass(frozen=True)
class Limited:
    """A key of which only some values are accepted: those that change nothing."""

    allowed: tuple[Any, ...]
    refusal: str
    reason: str = ""  # for a note about an accepted value
    type: ValueType = "any"


@dataclass(frozen=True)
class Unsupported:
    """A block for a feature that shardwell does not have: it is refused only if it asks for the feature."""

    refusal: str
    switches: tuple[str, ...] = ("enabled",)  # one that is true, or a number above 1, asks for the feature
    has_inner_switches: bool = False  # blocks inside have switches, too
    any_content_asks: bool = False  # any content asks for the feature, unless a switch is off


@dataclass(frozen=True)
class Renamed:
    """An old name of a key."""

    new: str


@dataclass(frozen=True)
class Switch:
    """An old flag: true means a value of another key, false means nothing."""

    new: str
    value: Any


Row = Inert | Limited | Unsupported | Renamed | Switch


def _not_yet(feature: str, remedy: str) -> str:
    return f"shardwell {__version__} does not have {feature} yet; {remedy}"


def _removed(feature: str, remedy: str = "remove the key") -> str:
    return f"removed, and will not come to shardwell ({feature}); {remedy}"


_OFF = "set it to false or remove it"
_DROP = 'remove the block, or set "enabled": false in it'
_ZERO = "zero_optimization."
_OPTIMIZER = f"{_ZERO}offload_optimizer."
_PARAM = f"{_ZERO}offload_param."
_CASTS = "floating inputs are always cast"
_FUSED = "torch's fused kernels are used where they exist"
_ANY_RANKS = "every checkpoint loads at any number of ranks"
_NO_SCALE = "bf16 needs no loss scale"
_NO_SEQUENCE = "there is no sequence parallelism"
_ONE_GATHER = "one all-gather per unit"
_NO_BUCKET = "one all-gather per unit, without a copy into a bucket"
_ONE_BY_ONE = "parameters are sharded one by one as they are made"
_CHECKS = "every step checks that gradients are finite; see shardwell.nonfinite"
_ONE_AHEAD = "the next unit is prefetched whatever its size"
_BESIDE = "host updates always overlap the backward pass"
_FP16_MASTERS = (
    "fp16 optimizer states would lose the squares of small gradients, and states have the dtype of the master weights; "
    f"{_OFF}, or use bf16 with bf16_master_weights_and_grads and bf16_optimizer_states"
)
# The classes whose parameters DeepSpeed sends in the lower precision by default.

_INERT: dict[str, Inert] = {
    # reporting
    "dump_state": Inert("`shardwell config` and engine.config show the values in force"),
    "log_level": Inert("set the level of the logger shardwell"),
    "timers": Inert("the lines of steps_per_print have the throughput"),
    # training
    "zero_allow_untested_optimizer": Inert("every torch optimizer is allowed", "flag", False),
    "zero_force_ds_cpu_optimizer": Inert("no optimizer is ever replaced by another", "flag", True),
    "disable_allgather": Inert("parameters are always all-gathered"),
    "graph_harvesting": Inert("use engine.compile()"),
    "vocabulary_size": Inert("nothing depends on it"),
    "sparse_gradients": Inert("gradients of sparse embeddings are made dense as they arrive: the numbers are the same"),
    "disable_python_gc": Inert("call gc.disable() in the script"),
    "seq_parallel_communication_data_type": Inert(_NO_SEQUENCE),
    "seq_parallel_comm_data_type": Inert(_NO_SEQUENCE),
    "use_data_before_expert_parallelism": Inert("ranks that share experts are neighbours"),
    "data_parallel_size": Inert("all ranks see data of their own"),
    "dataloader_drop_last": Inert("a last micro-batch that is not full is always dropped"),
    "optimizer.legacy_fusion": Inert(_FUSED),
    # precision
    "fp16.auto_cast": Inert(_CASTS, "flag", False),
    "fp16.fused_mode": Inert(_FUSED),
    "bf16.auto_cast": Inert(_CASTS),
    "bf16.immediate_grad_update": Inert("gradients are taken as soon as they are made"),
    "bf16.check_grad_overflow": Inert(_CHECKS),
    "bf16.check_overflow": Inert(_CHECKS),
    "bf16.initial_scale_power": Inert(_NO_SCALE),
    "bf16.loss_scale_window": Inert(_NO_SCALE),
    "bf16.hysteresis": Inert(_NO_SCALE),
    "bf16.consecutive_hysteresis": Inert(_NO_SCALE),
    "bf16.min_loss_scale": Inert(_NO_SCALE),
    # activation checkpointing
    "activation_checkpointing.contiguous_memory_optimization": Inert(
        "the allocator recycles checkpointed inputs", "flag", False
    ),
    "activation_checkpointing.number_checkpoints": Inert("nothing is reserved ahead", "count"),
    "activation_checkpointing.synchronize_checkpoint_boundary": Inert("streams keep the order", "flag", False),
    "activation_checkpointing.profile": Inert("use torch.profiler", "flag", False, promises_output=True),
    # checkpoints
    "checkpoint.tag_validation": Inert("ranks that save under different tags always raise", "tag validation", "warn"),
    "checkpoint.load_universal": Inert(_ANY_RANKS, "flag", False),
    "checkpoint.parallel_write": Inert("all ranks always write in parallel", "flags by name", {}),
    "checkpoint.checkpoint_serialization": Inert("nothing is pickled"),
    # sharding and its collectives
    f"{_ZERO}contiguous_gradients": Inert("gradients are always contiguous", "flag", True),
    f"{_ZERO}reduce_scatter": Inert("gradients are always reduce-scattered", "flag", True),
    f"{_ZERO}allgather_partitions": Inert("parameters are always all-gathered", "flag", True),
    f"{_ZERO}reduce_bucket_size": Inert("one reduce-scatter per unit", "size", 500_000_000, accepts_auto=True),
    f"{_ZERO}allgather_bucket_size": Inert(_ONE_GATHER, "size", 500_000_000, accepts_auto=True),
    f"{_ZERO}overlap_comm": Inert("communication always overlaps compute", "flag"),
    f"{_ZERO}round_robin_gradients": Inert("all ranks have equal shards already", "flag", False),
    f"{_ZERO}ignore_unused_parameters": Inert("unused parameters are never an error", "flag", True),
    f"{_ZERO}sub_group_size": Inert("the step runs unit by unit", "size", 1_000_000_000, accepts_auto=True),
    f"{_ZERO}stage3_gather_16bit_weights_on_model_save": Inert(
        "shardwell checkpoint export makes unsharded weights from any checkpoint", "flag", False, accepts_auto=True
    ),
    f"{_ZERO}stage3_module_granularity_threshold": Inert(
        "name modules that are to be one unit in leaf_module", "count", 0, accepts_auto=True
    ),
    f"{_ZERO}elastic_checkpoint": Inert(_ANY_RANKS),
    f"{_ZERO}memory_efficient_linear": Inert("linear layers stay torch's own"),
    f"{_ZERO}pipeline_loading_checkpoint": Inert("each rank reads only its own shards"),
    f"{_ZERO}override_module_apply": Inert("torch is not patched"),
    f"{_ZERO}log_trace_cache_warnings": Inert("there is no trace cache that could be invalid"),
    f"{_ZERO}enable_sanity_checks": Inert("the collectives of all ranks are always compared"),
    f"{_ZERO}compute_grad_norm": Inert("the norm is always computed: it shows gradients that are not finite"),
    f"{_ZERO}parameter_alignment": Inert("all parameters but those of odd sizes start aligned"),
    f"{_ZERO}use_multi_rank_bucket_allreduce": Inert("one reduce-scatter per unit"),
    f"{_ZERO}stage3_use_all_reduce_for_fetch_params": Inert(_ONE_GATHER),
    f"{_ZERO}use_all_reduce_for_fetch_params": Inert(_ONE_GATHER),
    f"{_ZERO}stage3_allgather_sequential": Inert(_NO_BUCKET),
    f"{_ZERO}allgather_sequential": Inert(_NO_BUCKET),
    f"{_ZERO}stage3_adaptive_prefetch_bucket_size": Inert(_ONE_AHEAD),
    f"{_ZERO}stage3_adaptive_prefetch_min_size": Inert(_ONE_AHEAD),
    f"{_ZERO}stage3_adaptive_prefetch_max_size": Inert(_ONE_AHEAD),
    f"{_ZERO}adaptive_prefetch_bucket_size": Inert(_ONE_AHEAD),
    f"{_ZERO}adaptive_prefetch_min_size": Inert(_ONE_AHEAD),
    f"{_ZERO}adaptive_prefetch_max_size": Inert(_ONE_AHEAD),
    f"{_ZERO}stage3_partition_stream_chunk_size": Inert(_ONE_BY_ONE),
    f"{_ZERO}partition_stream_chunk_size": Inert(_ONE_BY_ONE),
    f"{_ZERO}save_muon_momentum_buffer_in_memory": Inert("the momentum is stored with the other optimizer state"),
    # offload
    f"{_ZERO}cpu_offload_use_pin_memory": Inert("staging buffers are always pinned"),
    f"{_OPTIMIZER}pin_memory": Inert("staging buffers are pinned, stored state is not", "flag", False),
    f"{_OPTIMIZER}pipeline_read": Inert("the next unit is always read ahead", "flag", False),
    f"{_OPTIMIZER}pipeline_write": Inert("the last unit is always written behind", "flag", False),
    f"{_OPTIMIZER}fast_init": Inert("state is first written when it was first changed", "flag", False),
    f"{_OPTIMIZER}super_offload": Inert(_BESIDE),
    f"{_OPTIMIZER}superoffload": Inert(_BESIDE),
    f"{_OPTIMIZER}cpuadam_cores_perc": Inert("host updates use the cores near the GPU"),
    f"{_OPTIMIZER}convert_grad_on_cpu": Inert("host kernels convert gradients as they read them"),
    "torch_autocast.lower_precision_safe_modules": Inert(
        "torch's own list of operations decides what computes in lower precision, and parameters are communicated in "
        "their own dtype",
        "strings",
    ),
    f"{_PARAM}pin_memory": Inert("shards in host memory are always pinned", "flag", False),
    f"{_PARAM}buffer_size": Inert("staging buffers are as large as the largest shard", "size", 100_000_000),
}

_INERT |= {
    "pipeline.seed_layers": Inert("layers are built once, before they are divided over stages"),
    "pipeline.pipe_partitioned": Inert("with tensor parallelism, sequence_parallel splits activations"),
    "pipeline.grad_partitioned": Inert("with tensor parallelism, sequence_parallel splits activations"),
    "tensor_parallel.enabled": Inert("autotp_size turns tensor parallelism on"),
    "tensor_parallel.dtype": Inert("the bf16 and fp16 blocks say what is computed in"),
    "tensor_parallel.keep_module_on_host": Inert("the model stays where it is until it is cut"),
    "tensor_parallel.vocab_parallel_lm_head": Inert("the plan says how the last layer is cut"),
    "tensor_parallel.vocab_parallel_ce_backend": Inert("shardwell.tensor_parallel has the loss over a cut vocabulary"),
}

_LIMITED: dict[str, Limited] = {
    "tensor_parallel.preset_model": Limited(
        (None,), _not_yet("presets for tensor parallelism", "use plan or partition_config")
    ),
    "tensor_parallel.injection_policy_tuple": Limited(
        (None,), _not_yet("injection policies", "use plan or partition_config")
    ),
    "tensor_parallel.replace_with_kernel_inject": Limited((False,), _removed("kernel injection", _OFF), type="flag"),
    "tensor_parallel.kernel_inject": Limited((False,), _removed("kernel injection", _OFF), type="flag"),
    "fp16.fp16_master_weights_and_grads": Limited((False,), _FP16_MASTERS),
    "fp16_master_weights_and_grads": Limited((False,), _FP16_MASTERS),
    "bf16.loss_scale": Limited((0, 1), f"{_NO_SCALE}; use 1 or remove it", _NO_SCALE),
    "data_types.param_dtype": Limited((None,), _not_yet("a dtype for parameters alone", "use the bf16 or fp16 block")),
    "data_types.buffer_dtype": Limited((None,), _not_yet("a dtype for buffers", "cast them in the model")),
    "data_types.keep_in_fp32_modules": Limited(
        (None, "auto"),
        _not_yet("patterns of modules that stay fp32", "name the buffers in shardwell.keep_fp32_buffers"),
        "shardwell.keep_fp32_buffers names the buffers that keep their dtype",
    ),
    "checkpoint.use_node_local_storage": Limited(
        (False,),
        _not_yet("checkpoints on disks of single nodes", f"{_OFF}, and save to a folder that all nodes see"),
        type="flag",
    ),
    "checkpoint.writer": Limited((None, {}), _not_yet("a choice of writers", "remove it; all ranks write in parallel")),
    "aio.use_gds": Limited((False,), _not_yet("reads from NVMe straight to the GPU (GDS)", _OFF), type="flag"),
    f"{_ZERO}mics_shard_size": Limited((-1, 0, None), _removed("MiCS", "use zero_hpz_partition_size, or -1 here")),
    f"{_ZERO}mics_hierarchical_params_gather": Limited((False,), _removed("MiCS", _OFF)),
    f"{_ZERO}load_from_fp32_weights": Limited(
        (True,), _removed("the choice of weights to resume from", "masters are exact; set it to true or remove it")
    ),
    f"{_ZERO}legacy_stage1": Limited((False,), _removed("the legacy form of stage 1", _OFF)),
}

_DATASTATES = Unsupported(
    _not_yet("DataStates checkpoints", "remove the block; shardwell.async_save writes in the background"),
    any_content_asks=True,
)
_UNSUPPORTED: dict[str, Unsupported] = {
    "expert_parallel": Unsupported(
        'experts are shared by ranks with "shardwell": {"expert_parallel_size": N}; remove the block, or set '
        '"enabled": false in it'
    ),
    "autotuning": Unsupported(_not_yet("autotuning", _DROP)),
    "hybrid_engine": Unsupported(_not_yet("an engine for inference beside training", _DROP)),
    "compile": Unsupported(
        _not_yet("DeepCompile", 'remove the block, or set "deepcompile": false, and call engine.compile()'),
        ("enabled", "deepcompile", "offload_activation"),
    ),
    "datastates_ckpt": _DATASTATES,
    "datastates": _DATASTATES,
    f"{_ZERO}zenflow": Unsupported(_not_yet("ZenFlow", "remove the block"), any_content_asks=True),
    "elasticity": Unsupported(_removed("elasticity", f"{_DROP}; checkpoints load at any number of ranks")),
    "amp": Unsupported(_removed("Apex amp", "use bf16.enabled")),
    "curriculum_learning": Unsupported(_removed("curriculum learning", "order the samples in your own DataLoader")),
    "data_efficiency": Unsupported(_removed("the data efficiency library", _DROP)),
    "compression_training": Unsupported(_removed("compression training", "remove the block"), has_inner_switches=True),
    "weight_quantization": Unsupported(
        _removed("quantized inference", "use zero_quantized_nontrainable_weights"), any_content_asks=True
    ),
    "sparse_attention": Unsupported(
        _removed("sparse attention", "use torch.nn.attention.flex_attention in the model"), any_content_asks=True
    ),
    "nebula": Unsupported(_removed("Nebula checkpoints", "remove the block")),
    "progressive_layer_drop": Unsupported(_removed("progressive layer drop", "remove the block")),
    "quantize_training": Unsupported(_removed("quantized training (MoQ)", "remove the block"), any_content_asks=True),
    "eigenvalue": Unsupported(_removed("eigenvalues for quantized training", "remove the block")),
    f"{_ZERO}zeropp_loco_param": Unsupported(
        _removed("LoCo", "remove the key; shardwell.codecs.feedback keeps the quantisation error"),
        any_content_asks=True,
    ),
}

_OLD_NAMES: dict[str, Renamed | Switch] = {
    "bfloat16": Renamed("bf16"),
    "float16": Renamed("fp16"),
    "aio.thread_count": Renamed("aio.intra_op_parallelism"),
    "allgather_size": Renamed(f"{_ZERO}allgather_bucket_size"),
    f"{_ZERO}stage3_gather_fp16_weights_on_model_save": Renamed(f"{_ZERO}stage3_gather_16bit_weights_on_model_save"),
    f"{_ZERO}gather_fp16_weights_on_model_save": Renamed(f"{_ZERO}stage3_gather_16bit_weights_on_model_save"),
    f"{_ZERO}prefetch_bucket_size": Renamed(f"{_ZERO}stage3_prefetch_bucket_size"),
    f"{_ZERO}max_live_parameters": Renamed(f"{_ZERO}stage3_max_live_parameters"),
    f"{_ZERO}max_reuse_distance": Renamed(f"{_ZERO}stage3_max_reuse_distance"),
    f"{_ZERO}param_persistence_threshold": Renamed(f"{_ZERO}stage3_param_persistence_threshold"),
    f"{_ZERO}model_persistence_threshold": Renamed(f"{_ZERO}stage3_model_persistence_threshold"),
    f"{_ZERO}gather_16bit_weights_on_model_save": Renamed(f"{_ZERO}stage3_gather_16bit_weights_on_model_save"),
    f"{_ZERO}module_granularity_threshold": Renamed(f"{_ZERO}stage3_module_granularity_threshold"),
    "fp32_allreduce": Switch("communication_data_type", "fp32"),
    f"{_ZERO}cpu_offload": Switch(f"{_OPTIMIZER}device", "cpu"),
    f"{_ZERO}cpu_offload_params": Switch(f"{_PARAM}device", "cpu"),
    f"{_ZERO}cpu_offload_param": Switch(f"{_PARAM}device", "cpu"),
}

KEYS: dict[str, Row] = {**_INERT, **_LIMITED, **_UNSUPPORTED, **_OLD_NAMES}

REMOVED_OPTIMIZERS: dict[str, str] = {
    name: _removed("1-bit optimizers", "use AdamW or another optimizer of torch")
    for name in ("onebitadam", "zerooneadam", "onebitlamb")
}
