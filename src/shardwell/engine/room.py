"""What the device never needed so far, and what may fill it. All ranks decide alike."""

from __future__ import annotations

from collections.abc import Sequence

from shardwell.config import Config
from shardwell.unit import Context, Unit


def room(context: Context, share: float) -> float:
    """Bytes: a share of what is free on the rank that has least."""
    return context.world.least(share * context.device.free_bytes(), "ROOM")


def room_for_frozen(config: Config, units: Sequence[Unit], context: Context) -> int:
    """Elements of frozen parameters that may stay whole."""
    asked = config.shardwell.keep_frozen
    if asked != "auto":
        return asked
    frozen = [group for unit in units for group in unit.releasable if not group.trainable]
    if not frozen:
        return 0
    return int(room(context, 0.5)) // max(group.precision.compute.itemsize for group in frozen)
