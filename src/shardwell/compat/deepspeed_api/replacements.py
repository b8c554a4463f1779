"""What to use instead of attributes of DeepSpeed's engine that shardwell's has not, for error messages."""

from __future__ import annotations

_TIMES = "use torch.profiler, or engine.record() for the schedule of a step"
_NO_PARTS = "parts of units are the engine's business; safe_get_local_fp32_param and its relatives read them"
_REPLACED: dict[str, str] = {
    **dict.fromkeys(("timers", "tput_timer", "engine_timers", "get_wall_clock_timers"), _TIMES),
    "monitor": "log the values of engine.get_lr() and engine.get_global_grad_norm() with a tracker of your own",
    "flops_profiler": "use torch.profiler, or engine.record() for the schedule of a step",
    "checkpoint_engine": "engine.save_checkpoint writes itself, with asynchronous=True in the background",
    **dict.fromkeys(("fp16_groups", "bit16_groups", "single_partition_of_fp32_groups"), _NO_PARTS),
    "random_ltd_scheduler": "there is no token dropping",
    "curriculum_scheduler": "order the samples in your own DataLoader",
    "progressive_layer_drop": "there is no layer dropping",
    "generate": "the model has no generate; with one, engine.module.generate works at all stages",
    "train_batch": "there is no pipeline: call engine(batch), engine.backward(loss) and engine.step()",
    "eval_batch": "there is no pipeline: call engine(batch) under torch.no_grad()",
}


def replacement_for(name: str) -> str:
    """Return the end of a sentence that says what to use instead, or nothing."""
    return f": {_REPLACED[name]}" if name in _REPLACED else ""
