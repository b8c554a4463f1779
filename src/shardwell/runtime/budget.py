"""Memory that is free on the device for an engine. All ranks that run the same modules get the same answer."""

from __future__ import annotations

from collections.abc import Sequence

from shardwell.config import Config
from shardwell.sharding import EngineContext, Unit


def available_bytes(context: EngineContext, share: float) -> float:
    """Return a share of the free device bytes of the rank that has the fewest, of those that run the same modules.

    Stages of a pipeline are asked by themselves: only one of them may have a reason to ask.
    """
    return context.roles.stage.all_reduce_min(share * context.device.free_bytes(), "ROOM")


def frozen_budget(config: Config, units: Sequence[Unit], context: EngineContext) -> int:
    """Return the number of elements of frozen parameters that may stay unsharded."""
    asked = config.shardwell.keep_frozen
    if asked != "auto":
        return asked
    frozen = [group for unit in units for group in unit.resharding_groups if not group.trainable]
    if not frozen:
        return 0
    return int(available_bytes(context, 0.5)) // max(group.precision.compute.itemsize for group in frozen)
