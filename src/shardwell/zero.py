"""`shardwell.zero`: parameters that are born sharded, a look at parameters that are away, and layers cut into tiles."""

from __future__ import annotations

from shardwell.engine.offload_setup import open_tiers
from shardwell.sharding.gathered_parameters import GatheredParameters
from shardwell.sharding.released import is_released
from shardwell.sharding.sharded_init import ShardedInit
from shardwell.sharding.tiled import TiledLinear, tile_linears

__all__ = ["GatheredParameters", "Init", "TiledLinear", "is_released", "tile_linears"]


class Init(ShardedInit):
    """A context in which parameters are sharded over the ranks as soon as the next module is used.

    Without a configuration it shards; with a configuration whose stage is below 3 it does nothing. Shards are stored
    where `offload_param` or `remote_device` says. They are in bf16 or fp16 if the configuration computes in that, or in
    `dtype`. Until the context ends, a parameter that is used is unsharded in the dtype that its module gave it.
    Initialisers therefore work as usual, and their results are rounded. The other arguments of DeepSpeed's `Init` are
    in `init_arguments.py`.
    """

    _open_tiers = staticmethod(open_tiers)
