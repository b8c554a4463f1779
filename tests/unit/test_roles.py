"""The roles of an engine's collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import shardwell
from tests.support.internals import roles_of
from tests.support.models import zero
from tests.support.ranks import Ranks


def roles_with(block: dict[str, int]) -> dict[str, object]:
    """Build an engine and say which collectives its roles have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(3, zero_optimization=block)).engine
    roles = roles_of(engine)
    found = {
        "one axis": all(role is roles.all for role in (roles.shard, roles.data)),
        "replicates": roles.replicate is not None,
        "secondary": None if roles.secondary is None else roles.secondary.rank_group.size,
        "agreement": roles.agreement is roles.all.agreement,
        "size": roles.all.rank_group.size,
    }
    engine.destroy()
    return found


def test_a_single_rank_has_one_group_for_all_roles() -> None:
    assert roles_with({}) == {
        "one axis": True,
        "replicates": False,
        "secondary": None,
        "agreement": True,
        "size": 1,
    }


def two_engines() -> list[dict[str, object]]:
    assert dist.get_world_size() == 4
    return [roles_with({}), roles_with({"zero_hpz_partition_size": 2})]


def test_a_secondary_shard_is_the_only_role_with_a_group_of_its_own(ranks: Ranks) -> None:
    plain = {"one axis": True, "replicates": False, "agreement": True, "size": 4}
    for found in ranks.run(4, two_engines):
        assert found == [{**plain, "secondary": None}, {**plain, "secondary": 2}]
