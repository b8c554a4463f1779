"""Units of a model: sharding specs, layouts, buffers and the residency of their parameters."""

from shardwell.sharding.context import EngineContext
from shardwell.sharding.group import ShardedGroup
from shardwell.sharding.spec import GroupPrecision, ShardingSpec, spec_for
from shardwell.sharding.unit import Residency, Unit
from shardwell.sharding.wrap import UnitSpec, wrap_model

__all__ = [
    "EngineContext",
    "GroupPrecision",
    "Residency",
    "ShardedGroup",
    "ShardingSpec",
    "Unit",
    "UnitSpec",
    "spec_for",
    "wrap_model",
]
