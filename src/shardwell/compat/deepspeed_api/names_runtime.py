"""Rows of the table of names: `deepspeed.runtime` and what is inside it."""

from __future__ import annotations

from shardwell.compat.deepspeed_api.config_functions import READERS
from shardwell.compat.deepspeed_api.names_refused import MODEL_PARALLEL, ONE_OPTIMIZER, TILED
from shardwell.compat.deepspeed_api.rows import Constant, Row, Supported, everything, refused, supported

PIPE_NAMES: dict[str, Row] = {
    "PipelineModule": Supported("pipeline_module:PipelineModule"),
    **{name: Supported(f"shardwell.pipeline:{name}") for name in ("LayerSpec", "TiedLayerSpec")},
}

_ESTIMATES = {
    name: Supported(f"shardwell.plan:{name}")
    for name in (
        f"estimate_zero{stage}_model_states_mem_needs{kind}"
        for stage in (2, 3)
        for kind in ("", "_all_live", "_all_cold")
    )
}
_MICS = "a DeviceMesh of two dimensions shards over a part of the ranks: shardwell.initialize(mesh=...)"
_INIT_INSIDES = "zero.Init needs no replaced constructors here"
_PARTITION = {
    **supported("zero", "Init", "GatheredParameters", "register_external_parameter", "unregister_external_parameter"),
    **supported("parameters", "ZeroParamStatus", "ZeroParamType"),
    **supported("zero", "shutdown_init_context", "restore_init_context"),
    **refused(_INIT_INSIDES, "InsertPostInitMethodToModuleSubClasses", "DeepSpeedTensorOverride", "free_param"),
    **refused(_INIT_INSIDES, "AllGatherHandle", "AllGatherCoalescedHandle", "MultipleAllGatherHandles"),
    **refused("sharded parameters keep their shape; p.ds_status says that they are", "partitioned_param_data_shape"),
    **refused(_MICS, "MiCS_Init"),
}
_CHECKPOINTING = supported(
    "activation_checkpointing",
    *("configure", "is_configured", "checkpoint", "non_reentrant_checkpoint", "reset", "set_num_layers"),
    *("partition_activations_in_checkpoint", "CheckpointFunction", "get_cuda_rng_tracker"),
    *("model_parallel_cuda_manual_seed",),
)
_OF_PARAMETERS = ("fp32_param", "grad", "optimizer_state")
FRAGMENTS = supported(
    "fragments",
    *(
        f"safe_{verb}_{part}_{state}"
        for verb in ("get", "set")
        for part in ("full", "local")
        for state in _OF_PARAMETERS
    ),
    "safe_update_full_grad_vectorized",
)
FRAGMENT_INSIDES = "the parts of a parameter are the engine's business; use safe_get_full_fp32_param and its relatives"
FRAGMENT_MODULE = {
    **FRAGMENTS,
    **refused(FRAGMENT_INSIDES, "tensor_fragment", "fragment_address", "get_full_hp_param", "get_full_hp_grad"),
}
_SWAP_SIZES: dict[str, Row] = {"MIN_AIO_BYTES": Constant(1024**2), "MIN_SWAPPABLE_BYTES": Constant(1024**2)}
_STATE_MOVES = "engine.offload_states and engine.reload_states move states"

MODULES: dict[str, dict[str, Row]] = {
    "deepspeed.runtime": {},
    "deepspeed.runtime.constants": everything("constants"),
    "deepspeed.runtime.engine": {
        **supported("engine", "DeepSpeedEngine"),
        **supported("runtime_names", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"),
        "MEMORY_OPT_ALLREDUCE_SIZE": Constant(500000000),
        "MUON_OPTIMIZER": Constant("muon"),
    },
    "deepspeed.runtime.base_optimizer": supported("optimizer", "DeepSpeedOptimizer", "ZeROOptimizer"),
    "deepspeed.runtime.bf16_optimizer": refused(ONE_OPTIMIZER, "BF16_Optimizer"),
    "deepspeed.runtime.fp16": {},
    "deepspeed.runtime.fp16.fused_optimizer": refused(ONE_OPTIMIZER, "FP16_Optimizer"),
    "deepspeed.runtime.fp16.unfused_optimizer": refused(ONE_OPTIMIZER, "FP16_UnfusedOptimizer"),
    "deepspeed.runtime.fp16.loss_scaler": {
        **supported("loss_scaler", "LossScaler", "DynamicLossScaler", "LossScalerBase", "CreateLossScaler"),
        **refused("the fp16 block of the configuration sets the loss scale", "LossScaleConfig", "LossScaleProfile"),
        "INITIAL_LOSS_SCALE": Constant("init_scale"),
        "SCALE_WINDOW": Constant("scale_window"),
        "DELAYED_SHIFT": Constant("delayed_shift"),
        "CONSECUTIVE_HYSTERESIS": Constant("consecutive_hysteresis"),
        "MIN_LOSS_SCALE": Constant("min_scale"),
    },
    "deepspeed.runtime.lr_schedules": everything("lr_schedules"),
    "deepspeed.runtime.config": {
        **everything("config_object"),
        **supported("config_models", "HybridEngineConfig"),
        **supported("config_functions", *READERS),
    },
    "deepspeed.runtime.config_utils": {
        **supported("config_models", "DeepSpeedConfigModel", "pp_int", "get_config_default"),
        **everything("config_object"),
    },
    "deepspeed.runtime.precision_config": supported(
        "config_models",
        *("DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config"),
    ),
    "deepspeed.runtime.utils": {
        **everything("runtime_names"),
        **supported("partitioned", "PartitionedTensor"),
        **refused("the engine knows which gradients arrived", "count_used_parameters_in_backward"),
    },
    "deepspeed.runtime.comm.coalesced_collectives": {
        **supported("partitioned", "reduce_scatter_coalesced"),
        **refused("quantised gradients are zero_quantized_gradients in the configuration", "all_to_all_quant_reduce"),
    },
    "deepspeed.runtime.progressive_layer_drop": refused("there is no layer dropping", "ProgressiveLayerDrop"),
    "deepspeed.runtime.dataloader": {
        **supported("loader", "RepeatingLoader"),
        **supported("data", "DeepSpeedDataLoader"),
    },
    "deepspeed.runtime.zero": {
        **_PARTITION,
        **_ESTIMATES,
        "TiledLinear": Supported("shardwell.zero:TiledLinear"),
        **supported("zero", "TiledLinearReturnBias", "unwrap_model_for_generation"),
        **refused(ONE_OPTIMIZER, "DeepSpeedZeRoOffload"),
    },
    "deepspeed.runtime.zero.partition_parameters": _PARTITION,
    "deepspeed.runtime.zero.mics": refused(_MICS, "MiCS_Init", "MiCS_Optimizer", "MiCS_Offload"),
    "deepspeed.runtime.torch_autocast": refused(
        "parameters are communicated in their own dtype under autocast",
        *("PARAM_COMM_DTYPE_ATTR_NAME", "get_comm_dtype", "has_comm_dtype", "init_autocast_params"),
    ),
    "deepspeed.runtime.zero.parameter_offload": refused(ONE_OPTIMIZER, "DeepSpeedZeRoOffload"),
    "deepspeed.runtime.zero.tiling": {
        "TiledLinear": Supported("shardwell.zero:TiledLinear"),
        **supported("zero", "TiledLinearReturnBias"),
    },
    "deepspeed.runtime.zero.stage3": {
        **{name: row for name, row in _ESTIMATES.items() if "zero3" in name},
        **supported("zero", "unwrap_model_for_generation"),
        **supported("optimizer", "DeepSpeedZeroOptimizer_Stage3"),
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        **{name: row for name, row in _ESTIMATES.items() if "zero2" in name},
        **supported("optimizer", "DeepSpeedZeroOptimizer"),
    },
    "deepspeed.runtime.zero.offload_config": {
        **supported("enums", "OffloadStateTypeEnum"),
        **supported("config_models", "OffloadDeviceEnum", "DeepSpeedZeroOffloadParamConfig"),
        **supported("config_models", "DeepSpeedZeroOffloadOptimizerConfig"),
    },
    "deepspeed.runtime.zero.offload_states": {
        **supported("offload_states", "get_state_devices"),
        **refused(_STATE_MOVES, "offload_adam_states", "reload_adam_states"),
        **refused(_STATE_MOVES, "offload_optimizer_states", "reload_optimizer_states"),
    },
    "deepspeed.runtime.zero.config": {
        **supported("config_models", "ZeroStageEnum", "DeepSpeedZeroConfig", "get_zero_config"),
        **supported("config_models", "OffloadDeviceEnum", "DeepSpeedZeroOffloadParamConfig"),
        **supported("config_models", "DeepSpeedZeroOffloadOptimizerConfig"),
        "ZERO_OPTIMIZATION": Constant("zero_optimization"),
    },
    "deepspeed.runtime.zero.utils": {
        **supported("parameters", "is_zero_param"),
        **supported("zero", "is_zero_supported_optimizer", "ZeRORuntimeException"),
    },
    "deepspeed.runtime.zero.tensor_fragment": FRAGMENT_MODULE,
    "deepspeed.runtime.swap_tensor": _SWAP_SIZES,
    "deepspeed.runtime.swap_tensor.utils": {**_SWAP_SIZES, "AIO_ALIGNED_BYTES": Constant(1024)},
    "deepspeed.runtime.zero.linear": supported("zero", "zero3_linear_wrap", "LinearModuleForZeroStage3"),
    "deepspeed.runtime.zero.muon": {},
    "deepspeed.runtime.zero.muon.muon_optimizer": supported("optimizers", "MuonWithAuxAdam"),
    "deepspeed.runtime.zero.muon.original_muon": {
        **supported("optimizers", "MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam"),
        **refused("the arithmetic of Muon is inside the optimizer, which knows shards", "muon_update"),
    },
    "deepspeed.runtime.sparse_tensor": refused("gradients are dense", "SparseTensor"),
    "deepspeed.runtime.zero.leaf_module_config": supported("config_models", "DeepSpeedZeroLeafModuleConfig"),
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.tensor_parallel": refused(MODEL_PARALLEL, "TpTrainingManager", "TPTrainingConfig", "TPConfig"),
    "deepspeed.runtime.sequence_parallel": {},
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        **supported("sequence", "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"),
        **refused(TILED, *("sequence_tiled_compute", "SequenceTiledCompute", "TiledMLP", "TiledFusedLogitsLoss")),
    },
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": supported(
        "sequence_groups",
        *("initialize_sequence_parallel", "get_sequence_parallel_group", "get_sequence_parallel_world_size"),
        *("get_sequence_parallel_rank", "get_sequence_data_parallel_group", "get_sequence_data_parallel_world_size"),
        *("get_sequence_data_parallel_rank", "get_data_parallel_world_size", "get_data_parallel_rank"),
    ),
    "deepspeed.runtime.compiler": supported("modules", "is_compile_supported"),
    "deepspeed.runtime.pipe": {**PIPE_NAMES, "ProcessTopology": Supported("topology:ProcessTopology")},
    "deepspeed.runtime.pipe.module": {**PIPE_NAMES, "PipelineError": Supported("shardwell.errors:ShardwellError")},
    "deepspeed.runtime.pipe.engine": {
        "PipelineEngine": Supported("shardwell.engine.pipeline_engine:PipelinedEngine"),
        "PipelineError": Supported("shardwell.errors:ShardwellError"),
    },
    "deepspeed.runtime.pipe.topology": {
        **supported("topology", "ProcessTopology", "PipeDataParallelTopology", "PipeModelDataParallelTopology"),
        **supported("parallel_grid", "PipelineParallelGrid"),
    },
}
