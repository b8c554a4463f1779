"""`shardwell.zero`: parameters that are born sharded, a look at parameters that are away, and layers cut into tiles."""

from shardwell.unit.construct import Init
from shardwell.unit.opened import GatheredParameters
from shardwell.unit.tiled import TiledLinear, tile_linears

__all__ = ["GatheredParameters", "Init", "TiledLinear", "tile_linears"]
