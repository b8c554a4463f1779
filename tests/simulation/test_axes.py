"""Pipelines and tensor parallelism on the meta device: one rank of a cluster has the bytes of the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwell
from benchmarks.case_studies import CaseStudy, simulate
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow

MIDDLE = CaseStudy("middle", 12, 256, 8, 512, 64, 2, 12, 4, 6, 8, 1, 2 * 32 + 9, "")
WHOLE = CaseStudy("whole", 4, 256, 8, 512, 64, 2, 1, 4, 1, 16, 1, 5, "")


def simulated() -> list[dict[str, Any]]:
    dist.destroy_process_group()
    return [simulate(MIDDLE), simulate(WHOLE)]


def test_a_rank_of_a_grid_holds_and_receives_what_the_formulas_say(ranks: Ranks) -> None:
    middle, whole = ranks.run(1, simulated)[0]
    for found in (middle, whole):
        # what tensor ranks hold alike is sharded over them, too: a little less than the formula
        assert found["bytes_at_rest"] == pytest.approx(found["formula_at_rest"], rel=0.02)
        for axis, value in found["formula_traffic"].items():
            assert found["traffic"][axis] == pytest.approx(value, rel=0.02 if axis == "data" else 1e-9), axis
    assert middle["blocks_of_rank"] == 3  # of 14 layers over 6 stages
    assert whole["blocks_of_rank"] == 4


def unexpected() -> str:
    """Run a stage that is not told what it receives."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    split = shardwell.pipeline.split(model, loss_fn=lambda output, labels: (output - labels).square().mean())
    config = {"pipeline": {"stages": 2}, "optimizer": {"type": "AdamW", "params": {}}}
    engine: Any = shardwell.initialize(model=split, config=config, device="meta").engine
    rows = torch.empty(2, 8, device="meta")
    with pytest.raises(shardwell.ShardwellError) as caught:
        engine.train_batch(iter([(rows, rows)]))
    return str(caught.value)


def test_a_stage_on_meta_must_be_told_what_it_receives(ranks: Ranks) -> None:
    assert "say what it sends by engine.expect_hidden(tensor)" in ranks.run(1, unexpected)[0]
