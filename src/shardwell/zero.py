"""`shardwell.zero`: parameters that are born sharded, a look at parameters that are away, and layers cut into tiles."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwell.engine.offload_setup import open_tiers
from shardwell.errors import ShardwellError
from shardwell.optim.param_access import reading
from shardwell.sharding import released
from shardwell.sharding.gathered_parameters import GatheredParameters
from shardwell.sharding.init_parameters import InitParameter
from shardwell.sharding.released import is_released
from shardwell.sharding.sharded_init import ShardedInit
from shardwell.sharding.tiled import TiledLinear, tile_linears

__all__ = ["GatheredParameters", "Init", "TiledLinear", "is_released", "local_shard", "tile_linears"]


class Init(ShardedInit):
    """A context in which parameters are sharded over the ranks as soon as the next module is used.

    Without a configuration it shards; with a configuration whose stage is below 3 it does nothing. Shards are stored
    where `offload_param` or `remote_device` says. They are in bf16 or fp16 if the configuration computes in that, or in
    `dtype`. Until the context ends, a parameter that is used is unsharded in the dtype that its module gave it.
    Initialisers therefore work as usual, and their results are rounded. The other arguments of DeepSpeed's `Init` are
    in `init_arguments.py`.
    """

    _open_tiers = staticmethod(open_tiers)


def local_shard(param: nn.Parameter) -> Tensor:
    """Return a copy of this rank's part of a sharded parameter (1D), in the dtype that it computes in.

    It is empty where this rank holds none of the parameter. No collective runs, so one rank may call it alone.
    """
    owner = released.owner_or_none(param)
    if owner is None:
        raise ShardwellError("this parameter is not sharded: it was neither built in zero.Init nor given to initialize")
    if isinstance(owner, InitParameter):
        return owner.local_part()
    part: Tensor | None = reading(lambda access: access.local_master(), param)
    return torch.empty(0, dtype=param.dtype) if part is None else part.to(param.dtype)
