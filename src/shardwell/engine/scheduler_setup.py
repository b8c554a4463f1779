"""The scheduler that a configuration makes, and how far ahead of the running unit it all-gathers."""

from __future__ import annotations

import logging

from shardwell.config import Config
from shardwell.engine.offload_setup import add_links
from shardwell.runtime.gather_turns import GatherTurns
from shardwell.runtime.prefetch import PrefetchLimits
from shardwell.runtime.reducer import MicroStep
from shardwell.runtime.scheduler import Scheduler
from shardwell.sharding import EngineContext, Unit

_MOST_AHEAD = 2  # all-gathers in flight ahead of the running unit; more gave no faster step, and take memory


def make_scheduler(units: list[Unit], settings: Config, context: EngineContext) -> Scheduler:
    """Return the scheduler of these units, with the limits that the configuration and the backend set."""
    zero = settings.zero_optimization
    prefetches = zero.stage3_prefetch_bucket_size > 0
    # Gloo's threads and the units' compute share the cores, so that more all-gathers ahead would only take memory.
    most_ahead = _MOST_AHEAD if context.roles.shard.rank_group.backend == "nccl" else 1
    live, bucket = zero.stage3_max_live_parameters, zero.stage3_prefetch_bucket_size
    turns = settings.shardwell.gathers_take_turns and _may_take_turns(context)
    limits = PrefetchLimits(prefetches, live, zero.stage3_max_reuse_distance, bucket, most_ahead, not turns)
    below = [unit.numel for unit in units if unit.resharding_groups and unit.name]
    needed = sum(sorted(below)[-2:]) + sum(unit.numel for unit in units if not unit.name)  # the root stays unsharded
    if context.roles.all.rank_group.rank == 0 and prefetches and len(below) > 1 and 0 < limits.live < needed:
        logging.getLogger("shardwell").warning(
            "zero_optimization.stage3_max_live_parameters %d: some units are not gathered while another one runs, "
            "since that takes up to %d whole parameters. Raise it to that, or set 0 if this is meant.",
            limits.live,
            needed,
        )
    num_ranks = context.roles.averaged.rank_group.size
    paths_differ = settings.shardwell.find_unused_parameters and num_ranks > 1
    sums = settings.gradient_allreduce_op == "sum"
    micro_step = MicroStep(num_ranks, settings.gradient_accumulation_steps or 1, paths_differ, sums=sums)
    scheduler = Scheduler(units, limits, micro_step)
    if turns:
        scheduler.prefetch.gathers = GatherTurns(context.device, scheduler.reducer)
    add_links(scheduler, context)
    return scheduler


def _may_take_turns(context: EngineContext) -> bool:
    """Return whether all-gathers may take turns on two communicators; where they may not, the log says why."""
    has_two = context.roles.shard.rank_group.has_two_communicators
    reason = "" if has_two else "only several NCCL ranks have two communicators"
    if context.roles.pipe is not None:  # a kernel of one stage must not wait for another stage
        reason = "the stages of a pipeline use the link at different times"
    if reason and context.roles.all.rank_group.rank == 0:
        logging.getLogger("shardwell").warning("shardwell.gathers_take_turns has no effect: %s", reason)
    return not reason
