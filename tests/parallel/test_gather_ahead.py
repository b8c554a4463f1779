"""What is all-gathered ahead: two units where there is room for both, and updated parameters under the next forward.

Where all-gathers take turns on two communicators, the gradients of the backward need the room that the second one takes
in a forward, so that only a forward without gradients, a backward and frozen units are bounded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import shardwell
from shardwell.sharding import Residency
from tests.support.internals import gather_ahead, units_of
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.ranks import Ranks

BLOCK = 2785  # elements of a block of width 16


def trained(most: int, bucket: int, *, freezes: bool = False, bounds_forward: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Gpt(blocks=4)
    model.blocks.requires_grad_(not freezes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(3)).engine
    gather_ahead(engine, most, bucket, bounds_forward=bounds_forward)
    for batch in batches(3, 4):
        with engine.record() as trace:
            engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
            engine.step()
    with engine.record() as evaluated, torch.no_grad():
        engine(share(batches(1, 4)[0], dist.get_rank(), dist.get_world_size()))
    traces = [str(one).split("\n")[0] for one in (trace, evaluated)]
    passes = dict(zip(("forward", "backward"), traces[0].split(" B", 1), strict=True))
    return {**passes, "evaluation": traces[1], "values": whole_parameters(model)}


def in_several_ways() -> list[dict[str, Any]]:
    free = [trained(2, BLOCK, freezes=freezes, bounds_forward=False) for freezes in (False, True)]
    return [trained(1, 0), trained(2, 10 * BLOCK), trained(2, BLOCK), *free]


ONE, TWO = "G0 G1 F0 G2 F1 L1 G3 F2 L2", "G0 G1 G2 F0 G3 F1 L1 G4 F2 L2 G5 F3 L3"  # 0: root, 1: embedding, 2: a block


def test_two_units_are_gathered_ahead_where_both_fit_into_the_bucket(ranks: Ranks) -> None:
    for one, two, small, free, frozen in ranks.run(2, in_several_ways):
        assert all(found["forward"].startswith(ONE) for found in (one, small, frozen))
        assert all(found["forward"].startswith(TWO) for found in (two, free))
        twice = [found["evaluation"].startswith(TWO) for found in (one, two, small, free, frozen)]
        assert twice == [False, True, False, False, False]
        assert one["backward"] == small["backward"] == free["backward"] != two["backward"]
        for name, values in one["values"].items():
            assert all((values == found["values"][name]).all() for found in (two, small, free)), name


def publishes(stage: int) -> dict[str, Any]:
    """The order in which units are published, and which of them are still under way when each block begins."""
    torch.manual_seed(0)
    model = Gpt(blocks=4)
    engine = shardwell.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=zero(stage, shardwell={"bundle_size": 0})
    ).engine
    mine = share(batches(1, 4)[0], dist.get_rank(), dist.get_world_size())
    with engine.record() as trace:
        engine.backward(engine(mine))
        engine.step()
    under_way: list[list[str]] = []

    def note(*_: Any) -> None:
        under_way.append([unit.name for unit in units_of(engine) if unit.residency is Residency.UNSHARDING])

    hooks = [block.register_forward_pre_hook(note) for block in model.blocks]
    engine(mine)
    for hook in hooks:
        hook.remove()
    published = [int(token[1:]) for token in str(trace).split("\n")[0].split() if token[0] == "P"]
    return {"published": [units_of(engine)[number].name for number in published], "under way": under_way}


def test_units_are_published_in_the_order_of_the_next_forward_and_under_it(ranks: Ranks) -> None:
    for stage in (1, 2):
        for found in ranks.run(2, publishes, stage):
            blocks = [f"blocks.{number}" for number in range(4)]
            assert found["published"] == ["", "embed", *blocks]
            assert found["under way"] == [blocks[number + 1 :] for number in range(4)]
