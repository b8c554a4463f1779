"""Every key of DeepSpeed 0.19.8's configuration, by block; the migration page says what becomes of each.

Keys that older versions had, and that files still have, are in the list, too. This module is data.
"""

from __future__ import annotations

VERSION = "0.19.8"

_LOSS_SCALE = "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale"

# block ("" is the top) -> its keys
KEYS_OF_DEEPSPEED: dict[str, str] = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "steps_per_print dump_state disable_python_gc disable_allgather communication_data_type "
    "seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor gradient_allreduce_op "
    "gradient_clipping zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown "
    "use_data_before_expert_parallelism dataloader_drop_last log_level vocabulary_size sequence_parallel_size "
    "data_parallel_size sparse_gradients graph_harvesting fp32_allreduce allgather_size bfloat16",
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
    "fp16": f"enabled auto_cast fused_mode {_LOSS_SCALE} fp16_master_weights_and_grads",
    "bf16": "enabled immediate_grad_update check_grad_overflow check_overflow bf16_master_weights_and_grads "
    "bf16_optimizer_states",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "zero_optimization": "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
    "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
    "elastic_checkpoint zenflow sub_group_size cpu_offload cpu_offload_param cpu_offload_params "
    "cpu_offload_use_pin_memory stage3_prefetch_bucket_size prefetch_bucket_size stage3_param_persistence_threshold "
    "param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold "
    "stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance "
    "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
    "stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold module_granularity_threshold "
    "stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params stage3_allgather_sequential "
    "allgather_sequential stage3_partition_stream_chunk_size stage3_adaptive_prefetch_bucket_size "
    "stage3_adaptive_prefetch_min_size stage3_adaptive_prefetch_max_size ignore_unused_parameters legacy_stage1 "
    "round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights "
    "zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size "
    "mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
    "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer": "device nvme_path buffer_count pin_memory pipeline_read pipeline_write "
    "fast_init ratio super_offload cpuadam_cores_perc convert_grad_on_cpu",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "aio": "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds",
    "activation_checkpointing": "partition_activations cpu_checkpointing contiguous_memory_optimization "
    "number_checkpoints synchronize_checkpoint_boundary profile",
    "pipeline": "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned",
    "tensor_parallel": "autotp_size tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend "
    "injection_policy_tuple partition_config preset_model keep_module_on_host replace_with_kernel_inject "
    "kernel_inject dtype",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write writer checkpoint_serialization",
}

# blocks that are one feature each -> their keys
FEATURES_OF_DEEPSPEED: dict[str, str] = {
    "amp": "enabled opt_level",
    "autotuning": "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path "
    "tuner_type tuner_early_stopping tuner_num_trials arg_mappings model_info model_info_path mp_size "
    "max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu "
    "num_tuning_micro_batch_sizes",
    "comet": "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    "comms_logger": "enabled prof_all prof_ops verbose debug",
    "compile": "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation "
    "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log offload_parameters "
    "sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors "
    "keep_all_input_tensors passes",
    "compression_training": "weight_quantization activation_quantization sparse_pruning row_pruning head_pruning "
    "channel_pruning layer_reduction",
    "csv_monitor": "enabled output_path job_name",
    "curriculum_learning": "enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config",
    "data_efficiency": "enabled seed data_sampling data_routing",
    "datastates_ckpt": "",
    "eigenvalue": "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
    "elasticity": "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time version "
    "ignore_non_elastic_batch_info prefer_larger_batch num_gpus_per_node model_parallel_size",
    "expert_parallel": "enabled autoep_size expert_tensor_parallel_size preset_model use_grouped_mm comm_backend",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    "hybrid_engine": "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
    "tp_gather_partition_size enable_cuda_graph",
    "nebula": "enabled persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load "
    "load_path",
    "progressive_layer_drop": "enabled theta gamma",
    "quantize_training": "enabled quantize_verbose quantizer_kernel quantize_type quantize_bits quantize_schedule "
    "quantize_groups fp16_mixed_quantize",
    "sparse_attention": "mode block different_layout_per_head num_random_blocks attention num_local_blocks "
    "num_global_blocks",
    "tensorboard": "enabled output_path job_name",
    "timers": "throughput",
    "wandb": "enabled group team project",
    "weight_quantization": "enabled quantized_initialization post_init_quant",
}


def dotted_keys() -> list[str]:
    """Return every key outside the features, with its block."""
    return [f"{block}.{key}".lstrip(".") for block, keys in KEYS_OF_DEEPSPEED.items() for key in keys.split()]
