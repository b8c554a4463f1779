"""Two units are all-gathered ahead where there is room for both, with the same bits as one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import shardwell
from tests.support.internals import gather_ahead
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.ranks import Ranks

BLOCK = 2785  # elements of a block of width 16


def trained(most: int, bucket: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Gpt(blocks=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(3)).engine
    gather_ahead(engine, most, bucket)
    for batch in batches(3, 4):
        with engine.record() as trace:
            engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
            engine.step()
    return {"trace": str(trace).split("\n")[0], "values": whole_parameters(model)}


def in_three_ways() -> list[dict[str, Any]]:
    return [trained(1, 0), trained(2, 10 * BLOCK), trained(2, BLOCK)]


def test_two_units_are_gathered_ahead_where_both_fit_into_the_bucket(ranks: Ranks) -> None:
    for one, two, small in ranks.run(2, in_three_ways):
        # 0 is the root, 1 the embedding, 2 to 5 the blocks
        assert one["trace"].startswith("G0 G1 F0 G2 F1 L1 G3 F2 L2")
        assert two["trace"].startswith("G0 G1 G2 F0 G3 F1 L1 G4 F2 L2 G5 F3 L3")
        assert small["trace"] == one["trace"]  # a bucket of one block has no room for the second
        for name, values in one["values"].items():
            assert (values == two["values"][name]).all(), name
