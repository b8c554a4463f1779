"""`shardwell.zero`: parameters that are born sharded, a look at parameters that are away, and layers cut into tiles."""

from shardwell.sharding.gathered_parameters import GatheredParameters
from shardwell.sharding.sharded_init import Init
from shardwell.sharding.tiled import TiledLinear, tile_linears

__all__ = ["GatheredParameters", "Init", "TiledLinear", "tile_linears"]
