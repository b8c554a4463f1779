"""Gives an engine its monitor, if its configuration asks for output that people watch."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shardwell.config import Config
from shardwell.engine.startup_report import startup_line
from shardwell.spans import PROFILE_FOLDER

if TYPE_CHECKING:
    from shardwell.engine.engine import Engine
    from shardwell.monitor.monitor import Monitor
    from shardwell.monitor.recording import TimedTrace
    from shardwell.plan.comparison import PlanComparison


def monitor_for(engine: Engine) -> Monitor | None:
    """Return the monitor of rank 0, or None if nothing is asked for; the other ranks have none.

    With `steps_per_print` it begins with a line about the model and how it is trained.
    """
    if engine.global_rank != 0 or not asks_for_output(engine.settings) or engine._context.device.is_meta:
        return None
    from shardwell.monitor.monitor import Monitor

    if engine.settings.steps_per_print:
        print(startup_line(engine), flush=True)
    context = engine._context
    return Monitor(engine, context.device, context.roles.all.traffic, context.memory_stats)


def asks_for_output(config: Config) -> bool:
    """Return whether a configuration asks for anything that a monitor prints or writes."""
    blocks = (config.flops_profiler, config.comms_logger, config.tensorboard, config.csv_monitor)
    return bool(
        config.steps_per_print
        or config.wall_clock_breakdown
        or config.memory_breakdown
        or any(block.enabled for block in (*blocks, config.wandb, config.comet))
    )


def recording_with_times(engine: Engine) -> AbstractContextManager[TimedTrace]:
    """Return a context that records a timeline of an engine."""
    from shardwell.monitor.recording import timed_recording

    context = engine._context
    traffic = context.roles.all.traffic
    return timed_recording(engine._scheduler, context.device, traffic, engine.module, engine.global_rank)


def profile_if_asked(engine: Engine) -> None:
    """Record a few steps of a script that `shardwell run --profile DIR` has started."""
    if folder := os.environ.get(PROFILE_FOLDER):
        from shardwell.monitor.profiled_steps import ProfiledSteps

        ProfiledSteps(engine, recording_with_times, folder)


def compared_with_plan(engine: Engine, inputs: Any, loss: Any = None) -> PlanComparison:
    """Return what a simulation predicts of a step with such inputs, beside what this job counted, by tier."""
    from shardwell.plan.comparison import compare

    return compare(engine, inputs, loss)
