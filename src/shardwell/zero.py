"""`shardwell.zero`: parameters that are born sharded, and a look at parameters that are away."""

from shardwell.unit.construct import Init
from shardwell.unit.opened import GatheredParameters

__all__ = ["GatheredParameters", "Init"]
