"""Rows of the table of names: the package itself, and all that is in it but `runtime`."""

from __future__ import annotations

from shardwell.compat.deepspeed_api.names_refused import INFERENCE, KERNELS, MODEL_PARALLEL, MOE, PIPELINE, SEQUENCE
from shardwell.compat.deepspeed_api.names_runtime import FRAGMENT_INSIDES, FRAGMENT_MODULE, FRAGMENTS, PIPE_NAMES
from shardwell.compat.deepspeed_api.rows import Constant, Row, SameModule, Supported, everything, refused, supported

_LOGGING = supported("logging", "logger", "log_dist", "log_dist_once", "warning_once", "set_log_level_from_string")
_LEAVES = {
    **{name: Supported(f"shardwell.utils:{name}") for name in ("set_z3_leaf_module", "get_z3_leaf_modules")},
    **supported("leaves", "z3_leaf_module", "z3_leaf_parameter", "set_z3_leaf_modules", "unset_z3_leaf_modules"),
    **supported("leaves", "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix"),
}

_PACKAGE: dict[str, Row] = {
    **supported("initialization", "initialize"),
    **supported("engine", "DeepSpeedEngine"),
    **supported("optimizer", "DeepSpeedOptimizer"),
    **supported("comm", "init_distributed"),
    **supported("arguments", "add_config_arguments"),
    **supported("tensor_parallel", "tp_model_init", "set_autotp_mode"),
    **supported("accelerator", "get_accelerator"),
    **supported("logging", "logger", "log_dist"),
    **supported("on_device", "OnDevice"),
    **supported("data", "DeepSpeedDataLoader"),
    **supported("runtime_names", "DeepSpeedConfig", "DeepSpeedConfigError"),
    "__version__": Supported("version:VERSION"),
    "version": Supported("version:VERSION"),
    "__version_major__": Constant(0),
    "__version_minor__": Constant(19),
    "__version_patch__": Constant(8),
    "__git_hash__": Constant(None),
    "__git_branch__": Constant(None),
    "git_hash": Constant(None),
    "git_branch": Constant(None),
    "HAS_TRITON": Constant(False),
    "TORCH_DISTRIBUTED_DEFAULT_PORT": Constant(29500),
    "MUON_OPTIMIZER": Constant("muon"),
    "dist": SameModule("deepspeed.comm"),
    "zero": SameModule("deepspeed.runtime.zero"),
    "checkpointing": SameModule("deepspeed.runtime.activation_checkpointing.checkpointing"),
    **refused(INFERENCE, "init_inference", "InferenceEngine", "DeepSpeedInferenceConfig", "default_inference_config"),
    "PipelineModule": PIPE_NAMES["PipelineModule"],
    "PipelineEngine": Supported("shardwell.engine.pipeline_engine:PipelinedEngine"),
    **refused(PIPELINE, "DualPipeVEngine", "DualPipeVModule"),
    **refused(KERNELS, "DeepSpeedTransformerLayer", "DeepSpeedTransformerConfig", "replace_transformer_layer"),
    **refused(
        "generation and training share one engine here: deepspeed.zero.unwrap_model_for_generation gathers the model",
        "DeepSpeedHybridEngine",
    ),
}

_OPS_ADAM = {
    **supported("optimizers", "DeepSpeedCPUAdam", "FusedAdam"),
    **refused("ZenFlow's optimizers update a part of the gradients late", "ZenFlowCPUAdam", "ZenFlowSelectiveAdamW"),
}

MODULES: dict[str, dict[str, Row]] = {
    "deepspeed": _PACKAGE,
    "deepspeed.git_version_info": {
        "version": Supported("version:VERSION"),
        "git_hash": Constant(None),
        "git_branch": Constant(None),
        **supported("version", "torch_info"),
        "installed_ops": Supported("op_builders:__compatible_ops__"),
        "compatible_ops": Supported("op_builders:__compatible_ops__"),
        "accelerator_name": Constant(""),
    },
    "deepspeed.constants": {
        "TORCH_DISTRIBUTED_DEFAULT_PORT": Constant(29500),
        "default_pg_timeout": Supported("version:PROCESS_GROUP_TIMEOUT"),
    },
    "deepspeed.comm": everything("comm"),
    "deepspeed.comm.comm": everything("comm"),
    "deepspeed.comm.torch": {
        **supported("comm", "known_world_size"),
        **refused("collectives are torch.distributed's own", "TorchBackend"),
    },
    "deepspeed.comm.utils": supported("comm", "get_local_rank"),
    "deepspeed.comm.reduce_op": supported("comm", "ReduceOp"),
    "deepspeed.accelerator": everything("accelerator"),
    "deepspeed.accelerator.real_accelerator": supported("accelerator", "get_accelerator", "set_accelerator"),
    "deepspeed.accelerator.abstract_accelerator": supported("accelerator", "DeepSpeedAccelerator"),
    "deepspeed.utils": {
        **_LOGGING,
        **_LEAVES,
        **FRAGMENTS,
        **supported("loader", "RepeatingLoader"),
        **supported("on_device", "OnDevice"),
        **supported("comm", "is_initialized"),
        **supported("modules", "recursive_getattr", "recursive_setattr", "instrument_w_nvtx"),
        **refused(FRAGMENT_INSIDES, "tensor_fragment", "get_full_hp_param", "get_full_hp_grad", "fragment_address"),
        **refused(FRAGMENT_INSIDES, "get_hp_fragment_mapping", "link_hp_params", "lazy_init_hp_params_optimizer_state"),
        **refused(FRAGMENT_INSIDES, "set_full_hp_param", "set_full_hp_grad", "map_to_flat_opt_states"),
        **refused("ranks are bound to cores by `numactl` in front of the command", "get_numactl_cmd"),
    },
    "deepspeed.utils.logging": everything("logging"),
    "deepspeed.utils.groups": everything("groups"),
    "deepspeed.utils.tensor_fragment": FRAGMENT_MODULE,
    "deepspeed.utils.z3_leaf_module": _LEAVES,
    "deepspeed.utils.init_on_device": supported("on_device", "OnDevice"),
    "deepspeed.utils.nvtx": supported("modules", "instrument_w_nvtx"),
    "deepspeed.utils.module_utils": supported("modules", "recursive_getattr", "recursive_setattr"),
    "deepspeed.utils.torch": supported("modules", "required_torch_version", "register_grad_hook"),
    "deepspeed.utils.timer": {
        **supported("timer", "SynchronizedWallClockTimer", "ThroughputTimer", "NoopTimer", "trim_mean"),
    },
    "deepspeed.utils.bwc": everything("model_parallel_unit"),
    "deepspeed.utils.numa": {
        **supported("launcher", "parse_range_list"),
        **refused("ranks are bound to cores by `numactl` in front of the command", "get_numactl_cmd", "get_numa_cores"),
    },
    "deepspeed.utils.zero_to_fp32": everything("zero_to_fp32"),
    "deepspeed.utils.zero_to_torch": everything("zero_to_torch"),
    "deepspeed.checkpoint": {
        **everything("checkpoint_names"),
        **refused(
            "checkpoints of shardwell load at any number of ranks; `shardwell checkpoint` converts others",
            *("DeepSpeedCheckpoint", "ZeROCheckpoint", "reshape_meg_2d_parallel", "model_3d_desc"),
            *("get_model_3d_descriptor", "merge_state", "enable_universal_checkpoint"),
        ),
        **refused(MODEL_PARALLEL, "SubparamShape"),
    },
    "deepspeed.checkpoint.constants": everything("checkpoint_names"),
    "deepspeed.checkpoint.utils": {
        **supported("files", "clone_tensors_for_torch_save"),
        **supported("checkpoint_names", "get_model_ckpt_name_for_rank", "get_zero_ckpt_name_for_rank"),
        **supported("checkpoint_names", "get_layer_ckpt_name_for_rank"),
    },
    "deepspeed.checkpoint.ds_to_universal": everything("universal"),
    "deepspeed.ops": {
        **supported("op_builders", "__compatible_ops__"),
        **refused(KERNELS, "DeepSpeedTransformerLayer", "DeepSpeedTransformerConfig"),
    },
    "deepspeed.ops.adam": _OPS_ADAM,
    "deepspeed.ops.adam.cpu_adam": supported("optimizers", "DeepSpeedCPUAdam"),
    "deepspeed.ops.adam.fused_adam": supported("optimizers", "FusedAdam"),
    "deepspeed.ops.adagrad": supported("optimizers", "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.adagrad.cpu_adagrad": supported("optimizers", "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.lion": supported("optimizers", "DeepSpeedCPULion", "FusedLion"),
    "deepspeed.ops.lion.cpu_lion": supported("optimizers", "DeepSpeedCPULion"),
    "deepspeed.ops.lion.fused_lion": supported("optimizers", "FusedLion"),
    "deepspeed.ops.lamb": supported("optimizers", "FusedLamb"),
    "deepspeed.ops.lamb.fused_lamb": supported("optimizers", "FusedLamb"),
    "deepspeed.ops.muon": supported("optimizers", "MuonWithAuxAdam"),
    "deepspeed.ops.aio": supported("op_builders", "AsyncIOBuilder"),
    "deepspeed.ops.op_builder": everything("op_builders"),
    "deepspeed.ops.op_builder.all_ops": supported("op_builders", "ALL_OPS"),
    "deepspeed.ops.op_builder.builder": supported("op_builders", "OpBuilder", "CUDAOpBuilder"),
    "deepspeed.monitor": {},
    "deepspeed.monitor.config": supported("config_models", "get_monitor_config", "DeepSpeedMonitorConfig"),
    "deepspeed.monitor.monitor": supported(
        "monitor", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor", "CometMonitor"
    ),
    "deepspeed.monitor.tensorboard": supported("monitor", "TensorBoardMonitor"),
    "deepspeed.monitor.wandb": supported("monitor", "WandbMonitor"),
    "deepspeed.monitor.csv_monitor": supported("monitor", "csvMonitor"),
    "deepspeed.monitor.comet": supported("monitor", "CometMonitor"),
    "deepspeed.profiling": {},
    "deepspeed.profiling.flops_profiler": supported("flops_profiler", "FlopsProfiler", "get_model_profile"),
    "deepspeed.profiling.flops_profiler.profiler": supported("flops_profiler", "FlopsProfiler", "get_model_profile"),
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": {
        "DEEPSPEED_ENVIRONMENT_NAME": Supported("launcher:ENVIRONMENT_FILE"),
        **supported("launcher", "main", "fetch_hostfile", "parse_resource_filter", "parse_inclusion_exclusion"),
        **supported("launcher", "_parse_hostfile"),
        **refused("the launcher passes the command line on by itself", "encode_world_info", "parse_args"),
    },
    "deepspeed.launcher.multinode_runner": refused(
        "ranks on other nodes are started by your cluster: run `shardwell run` once on each node",
        *(f"{name}Runner" for name in ("MultiNode", "PDSH", "OpenMPI", "MPICH", "IMPI", "Slurm", "MVAPICH")),
    ),
    "deepspeed.launcher.constants": {
        **{
            f"{name}_LAUNCHER": Constant(name.lower())
            for name in ("PDSH", "OPENMPI", "MPICH", "IMPI", "SLURM", "MVAPICH")
        },
        "PDSH_MAX_FAN_OUT": Constant(1024),
    },
    "deepspeed.pipe": {**PIPE_NAMES, **refused(PIPELINE, "DualPipeVModule")},
    "deepspeed.sequence": {},
    "deepspeed.sequence.layer": {
        **supported("sequence", "DistributedAttention"),
        **refused(SEQUENCE, "_SeqAllToAll", "single_all_to_all"),
    },
    "deepspeed.moe": {},
    "deepspeed.moe.layer": refused(MOE, "MoE"),
    "deepspeed.moe.utils": {
        **supported("modules", "has_moe_layers", "is_moe_param", "is_moe_param_group", "configure_moe_param_groups"),
        **supported("modules", "split_params_into_different_moe_groups_for_optimizer"),
        **refused(
            MOE,
            *("split_params_into_shared_and_expert_params", "split_params_grads_into_shared_and_expert_params"),
        ),
    },
    "deepspeed.env_report": {
        **refused("`shardwell doctor` reports about this machine", "main", "cli_main", "op_report", "debug_report"),
    },
}
