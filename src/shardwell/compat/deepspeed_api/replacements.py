"""What to use instead of attributes of DeepSpeed's engine that shardwell's has not, for error messages."""

from __future__ import annotations

_TIMES = "wall_clock_breakdown prints the times of a step; engine.record() gives its schedule"
_NO_PARTS = "parts of units are the engine's business; safe_get_local_fp32_param and its relatives read them"
_REPLACED: dict[str, str] = {
    **dict.fromkeys(("timers", "tput_timer", "engine_timers", "get_wall_clock_timers"), _TIMES),
    "flops_profiler": "the block flops_profiler prints a table; deepspeed.profiling.flops_profiler counts any model",
    "checkpoint_engine": "engine.save_checkpoint writes itself, with asynchronous=True in the background",
    **dict.fromkeys(("fp16_groups", "bit16_groups", "single_partition_of_fp32_groups"), _NO_PARTS),
    **dict.fromkeys(("fp32_partitioned_groups_flat", "parallel_partitioned_bit16_groups"), _NO_PARTS),
    **dict.fromkeys(("fp16_partitioned_groups_flat", "bit16_groups_flat", "fp32_groups_flat"), _NO_PARTS),
    "nccl_start_alignment_factor": "shards begin at multiples of 8 elements",
    "_get_norm_groups": "the norm of all gradients is engine.get_global_grad_norm(), after a step",
    "unscale_and_clip_grads": "the norm is engine.get_global_grad_norm(), and clipping is part of engine.step()",
    "random_ltd_scheduler": "there is no token dropping",
    "curriculum_scheduler": "order the samples in your own DataLoader",
    "progressive_layer_drop": "there is no layer dropping",
    "generate": "the model has no generate; with one, engine.module.generate works at all stages",
    "train_batch": "this engine has no pipeline: call engine(batch), engine.backward(loss) and engine.step()",
    "eval_batch": "this engine has no pipeline: call engine(batch) under torch.no_grad()",
    "sparse_tensor_module_names": "gradients are dense",
    "csr_tensor_module_names": "gradients are dense",
}


def replacement_for(name: str) -> str:
    """Return the end of a sentence that says what to use instead, or nothing."""
    return f": {_REPLACED[name]}" if name in _REPLACED else ""
