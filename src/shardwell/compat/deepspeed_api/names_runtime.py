"""Rows of the table of names: `deepspeed.runtime` and what is inside it."""

from __future__ import annotations

from shardwell.compat.deepspeed_api.names_refused import MODEL_PARALLEL, ONE_OPTIMIZER, PIPELINE
from shardwell.compat.deepspeed_api.rows import Constant, Row, Supported, everything, refused, supported

_ESTIMATES = supported(
    "estimates",
    *(
        f"estimate_zero{stage}_model_states_mem_needs{kind}"
        for stage in (2, 3)
        for kind in ("", "_all_live", "_all_cold")
    ),
)
_INIT_INSIDES = "zero.Init needs no replaced constructors here"
_PARTITION = {
    **supported("zero", "Init", "GatheredParameters", "register_external_parameter", "unregister_external_parameter"),
    **supported("parameters", "ZeroParamStatus", "ZeroParamType"),
    **supported("zero", "shutdown_init_context", "restore_init_context"),
    **refused(_INIT_INSIDES, "InsertPostInitMethodToModuleSubClasses", "DeepSpeedTensorOverride", "free_param"),
    **refused(_INIT_INSIDES, "AllGatherHandle", "AllGatherCoalescedHandle", "partitioned_param_data_shape"),
}
_CHECKPOINTING = supported(
    "activation_checkpointing",
    *("configure", "is_configured", "checkpoint", "non_reentrant_checkpoint", "reset", "set_num_layers"),
    *("partition_activations_in_checkpoint", "CheckpointFunction", "get_cuda_rng_tracker"),
    *("model_parallel_cuda_manual_seed",),
)
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
        "INITIAL_LOSS_SCALE": Constant("init_scale"),
        "SCALE_WINDOW": Constant("scale_window"),
        "DELAYED_SHIFT": Constant("delayed_shift"),
        "CONSECUTIVE_HYSTERESIS": Constant("consecutive_hysteresis"),
        "MIN_LOSS_SCALE": Constant("min_scale"),
    },
    "deepspeed.runtime.lr_schedules": everything("lr_schedules"),
    "deepspeed.runtime.config": {**everything("config_object"), **supported("config_models", "HybridEngineConfig")},
    "deepspeed.runtime.config_utils": {
        **supported("config_models", "DeepSpeedConfigModel", "pp_int", "get_config_default"),
        **everything("config_object"),
    },
    "deepspeed.runtime.precision_config": supported(
        "config_models",
        *("DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config"),
    ),
    "deepspeed.runtime.utils": {**everything("runtime_names"), **supported("partitioned", "PartitionedTensor")},
    "deepspeed.runtime.comm.coalesced_collectives": {
        **supported("partitioned", "reduce_scatter_coalesced"),
        **refused("quantised gradients are zero_quantized_gradients in the configuration", "all_to_all_quant_reduce"),
    },
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
        "ZERO_OPTIMIZATION": Constant("zero_optimization"),
    },
    "deepspeed.runtime.zero.utils": {
        **supported("parameters", "is_zero_param"),
        **supported("zero", "is_zero_supported_optimizer", "ZeRORuntimeException"),
    },
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
    "deepspeed.runtime.compiler": supported("modules", "is_compile_supported"),
    "deepspeed.runtime.pipe": refused(PIPELINE, "PipelineModule", "LayerSpec", "TiedLayerSpec"),
}
