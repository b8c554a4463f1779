"""The optimizer that steps a unit. A unit keeps it for this package, and does not know its class."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from shardwell.sharding import Unit

if TYPE_CHECKING:
    from shardwell.optim.optimizer import ShardedOptimizer


def optimizer_of(unit: Unit) -> ShardedOptimizer:
    """Return the optimizer of a unit that has one: `unit.optimizer` is not None."""
    return cast("ShardedOptimizer", unit.optimizer)
