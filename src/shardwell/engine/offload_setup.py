"""What `initialize` asks of `offload/`, which is imported only where a configuration names a tier below the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from shardwell.config import Config, stage_is_open
from shardwell.memory import Device, MemoryStats, TemporaryBuffers, Tier
from shardwell.memory.statistics import human
from shardwell.optim import OptimizerFactory
from shardwell.runtime.scheduler import Scheduler
from shardwell.sharding import EngineContext, UnitSpec
from shardwell.sharding.init_parameters import InitRegistry, InitStorage
from shardwell.sharding.model_states import ModelStates, OffloadPlan
from shardwell.sharding.tiers import TierFactory

_WITHOUT_OFFLOAD = (("auto", "fp32", "auto"), ("after_norm", "fp32", "auto"))  # commit, moments, gradients


def uses_offload(settings: Config) -> bool:
    """Return whether states may be stored below the device, or an option asks for what only offloading has."""
    own, zero = settings.shardwell, settings.zero_optimization
    is_on_device = zero.offload_optimizer.device == zero.offload_param.device == "none" and own.placement != "auto"
    return not is_on_device or (own.commit, own.moments, own.gradients) not in _WITHOUT_OFFLOAD


def settle_stage(
    settings: Config, sizes: Callable[[Config], ModelStates], model: nn.Module, context: EngineContext
) -> Config:
    """Return the configuration with a stage, and maybe tiers, in place of the stage "auto"."""
    if not stage_is_open(settings):
        return settings
    from shardwell.offload.stage_choice import choose_stage

    return choose_stage(settings, sizes, list(model.parameters()), context)


def plan_states(
    states: ModelStates,
    specs: list[UnitSpec],
    settings: Config,
    factory: OptimizerFactory | None,
    context: EngineContext,
) -> OffloadPlan:
    """Return where the states of all units are stored; raise if they do not fit there."""
    if not uses_offload(settings):
        return OffloadPlan.on_device(states)
    from shardwell.offload.plan import plan_offload

    may_keep = factory is not None and not factory.is_collective()
    found = plan_offload(states, specs, settings, context, may_keep=may_keep)
    if found.kept:
        context.roles.agreement.failures.out_of_memory = (
            f"shardwell keeps optimizer state of {len(found.kept)} units ({human(found.kept_bytes())}) on the device "
            'although it is offloaded, because the next forward needs them first. With "ratio": 1.0 in '
            "zero_optimization.offload_optimizer all of it is on the host."
        )
    return found


def with_tiers(context: EngineContext, settings: Config, offload: OffloadPlan) -> EngineContext:
    """Return the context with what stores state below the device, if any of it is stored there."""
    if not uses_offload(settings):
        return context
    from shardwell.offload.plan import open_disk

    disk = open_disk(settings) if context.device.is_simulated or not context.device.is_meta else None
    if disk is None and not any(place.depth for place in offload.places.values()):
        return context
    from shardwell.offload.storage import OffloadTiers

    tiers = OffloadTiers(
        context.device, context.memory_stats, context.temporary, context.roles.shard.rank_group.size, disk
    )
    if disk is not None:
        disk.tell = context.roles.agreement.fail  # otherwise the other ranks would wait for what this rank cannot read
    block = settings.zero_optimization.offload_param
    if disk is not None and block.device == "nvme":
        tiers.read_parameters_into(block.buffer_count)
    return replace(context, tiers=tiers)


def replan_states(before: OffloadPlan, states: ModelStates, settings: Config) -> OffloadPlan:
    """Return the plan for a model that has changed since."""
    if not uses_offload(settings):
        return OffloadPlan.on_device(states)
    from shardwell.offload.plan import replan

    return replan(before, states, settings)


def open_tiers(
    settings: Config, folders: list[Path], device: Device, stats: MemoryStats, temporary: TemporaryBuffers
) -> TierFactory:
    """Return what stores shards on disk, in these folders, for parameters that no engine has yet."""
    from shardwell.offload.disk import AioSettings, DiskTier
    from shardwell.offload.storage import OffloadTiers

    disk = DiskTier(folders, AioSettings(**settings.aio.model_dump()))
    return OffloadTiers(device, stats, temporary, 1, disk)


def registry_for(context: EngineContext, settings: Config, tier: Tier) -> InitRegistry:
    """Return owners for parameters that stay sharded between two engines, on the tier that they were on."""
    block = settings.zero_optimization.offload_param
    folders = [Path(path.strip()) for path in (block.nvme_path or "").split(",") if path.strip()]
    rest = InitStorage(tier, None, False, partial(open_tiers, settings, folders))
    return InitRegistry(context.device.torch_device, settings, rest)


def add_links(scheduler: Scheduler, context: EngineContext) -> None:
    """Append the links of the prefetch chain that bring shards to the device."""
    if context.tiers is not None:
        from shardwell.offload.prefetch import offload_links

        num_ranks, buffers = context.roles.shard.rank_group.size, context.tiers.read_buffers
        scheduler.prefetch.links += offload_links(scheduler.prefetch.budget, num_ranks, buffers, scheduler.record)
