"""`"stage": "auto"`: the first way to store states that fits on the machine, from the fastest to the smallest.

`initialize` knows no inputs, so states are all that is counted; `shardwell.memory.device` says which share of a device
they may fill, and the rest is left to activations. Stages come first, then states below the device: on the tiers that
the offload blocks name or, if there is no such block, on the host. All ranks choose alike: what is free is that of the
rank with the least, and the furthest choice of a rank counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from shardwell.config import Config, with_stage
from shardwell.errors import ConfigError, NoRoomError
from shardwell.memory import Tier
from shardwell.offload.budget import tier_budgets
from shardwell.offload.placement import plan, table
from shardwell.offload.plan import buffers_for, deepest, paths_of, rungs_of
from shardwell.sharding import EngineContext, released
from shardwell.sharding.init_parameters import InitParameter
from shardwell.sharding.model_states import Bytes, ModelStates, TierPlacement
from shardwell.sharding.ways import passing_bytes

_TOKEN = "STAGE"
_BLOCKS = ("offload_optimizer", "offload_param")


@dataclass(frozen=True)
class StageOption:
    """A stage that may be chosen, with states on the device only or also below it; `why_not` if it is refused."""

    stage: int
    goes_below: bool
    settings: Config | None
    why_not: str = ""

    def __str__(self) -> str:
        return f"stage {self.stage}{' with states below the device' if self.goes_below else ''}"


def choose_stage(
    settings: Config,
    sizes: Callable[[Config], ModelStates],
    parameters: Sequence[nn.Parameter],
    context: EngineContext,
) -> Config:
    """Return the configuration of the first option that fits on every rank; log it, with figures, on rank 0."""
    free = _free(settings, parameters, context)
    options = _options(settings, parameters, context)
    found, chosen = [], len(options)
    for index, option in enumerate(options):
        needed = None if option.settings is None else _needed(option, sizes, free, context)
        found.append(needed)
        if needed is not None and all(size <= free[tier] for tier, size in needed.items()):
            chosen = index
            break
    # The parts of a model on pipeline stages differ, and so may what fits.
    agreed = int(-context.roles.all.all_reduce_min(-float(chosen), _TOKEN))
    told = [_told(option, needed, free) for option, needed in zip(options, found, strict=False)]
    if agreed == len(options) or (last := options[agreed].settings) is None:
        raise NoRoomError(
            f'zero_optimization.stage "auto": no stage fits. On each rank: {"; ".join(told)}. Use more ranks, name a '
            'tier below (zero_optimization.offload_optimizer and offload_param with the device "cpu", or "nvme" and a '
            "nvme_path), or raise shardwell.memory"
        )
    memory, is_own = settings.shardwell.memory, context.device.has_device_memory
    share = memory.device if is_own or memory.device > 1 else memory.host  # a CPU has no other memory
    left = f"{1 - share:.0%} of the free bytes" if share <= 1 else f"what is above {share:,.0f} bytes"
    why = "; ".join(told[: agreed + 1] or [str(options[agreed])])
    if context.roles.all.rank_group.rank == 0:
        logging.getLogger("shardwell").info(
            'zero_optimization.stage "auto": %s. On each rank: %s. No inputs are known at initialize, so states alone '
            "decide, and %s on a device are left to activations.",
            *(options[agreed], why, left),
        )
    return with_stage(last, options[agreed].stage, why)


def _free(settings: Config, parameters: Sequence[nn.Parameter], context: EngineContext) -> dict[Tier, float]:
    """Return the bytes that states may fill; on a CPU all of them are in host memory."""
    free = tier_budgets(settings, context, parameters, paths_of(settings), 0, 0)
    if not context.device.has_device_memory and settings.shardwell.memory.device <= 1:
        free[Tier.DEVICE] = free[Tier.HOST]
    return free


def _options(settings: Config, parameters: Sequence[nn.Parameter], context: EngineContext) -> list[StageOption]:
    """Return the options from the fastest to the smallest; those that the configuration contradicts are refused."""
    stages = [0, 3] if context.roles.shard.rank_group.size == 1 else [1, 2, 3]
    if (settings.gradient_accumulation_steps or 1) == 1 and 2 in stages:
        stages.remove(1)  # which moves as much as stage 2, and stores more
    if any(isinstance(released.owner_of(one), InitParameter) for one in parameters if released.is_owned(one)):
        stages = [3]  # the model of zero.Init comes sharded
    zero = settings.zero_optimization
    names_tiers = any(getattr(zero, block).device != "none" for block in _BLOCKS)
    is_open = all(
        settings.origins.get(f"zero_optimization.{block}.device", "default") == "default" for block in _BLOCKS
    )
    below = names_tiers or (is_open and context.device.has_device_memory)
    above = stages if len(stages) == 1 or stages[0] else [0]
    return [
        *(_option(settings, stage, False) for stage in above),
        *(_option(settings, stage, True) for stage in stages if below),
    ]


def _option(settings: Config, stage: int, goes_below: bool) -> StageOption:
    zero, own = settings.zero_optimization, settings.shardwell
    if goes_below and all(getattr(zero, block).device == "none" for block in _BLOCKS):
        host = {"offload_optimizer": zero.offload_optimizer.model_copy(update={"device": "cpu"})}
        if stage == 3:
            host["offload_param"] = zero.offload_param.model_copy(update={"device": "cpu"})  # type: ignore[assignment]
        settings = settings.with_block("zero_optimization", zero.model_copy(update=host))
    is_placed = settings.origins.get("shardwell.placement", "default") != "default"
    if not is_placed and any(getattr(settings.zero_optimization, block).device != "none" for block in _BLOCKS):
        settings = settings.with_block("shardwell", own.model_copy(update={"placement": "auto"}))
    try:
        return StageOption(stage, goes_below, with_stage(settings, stage, "a choice"))
    except ConfigError as error:
        return StageOption(stage, goes_below, None, str(error).replace("\n", " "))


def _needed(
    option: StageOption, sizes: Callable[[Config], ModelStates], free: dict[Tier, float], context: EngineContext
) -> Bytes:
    """Return the bytes that an option needs, with units placed as high as they fit, and unsharded units that pass."""
    assert option.settings is not None
    states = sizes(option.settings)
    rungs = [TierPlacement()]
    if option.goes_below:
        is_asked = option.settings.shardwell.placement == "asked"
        rungs = [deepest(option.settings)] if is_asked else rungs_of(option.settings)
    needs = [[states.needs(name, rung) for rung in rungs] for name in states.units]
    buffers = [buffers_for(states, rung, option.settings, context.device) for rung in rungs]
    passing = passing_bytes(states)
    found = plan(needs, buffers, {**free, Tier.DEVICE: free[Tier.DEVICE] - passing}).needed
    found[Tier.DEVICE] += passing
    return found


def _told(option: StageOption, needed: Bytes | None, free: dict[Tier, float]) -> str:
    return f"{option}: {option.why_not if needed is None else table(needed, free)}"
