"""Thin trials of rows that are not offered yet: they show that the table carries them without forks in the engine.

The configuration refuses these keys; the trials lift the refusal on their own ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.comm import Kind
from shardwell.config import unsupported
from tests.models import Gpt, batches, share, zero
from tests.parity.loops import Case, all_sharded, distance, plainly
from tests.ranks import Ranks

KEYS = ("zero_optimization.zero_hpz_partition_size",)


def on_trial(cases: list[Case], stage: int) -> list[dict[str, Any]]:
    for key in KEYS:
        unsupported.ONLY.pop(key, None)
    return all_sharded(cases, stage)


# ------------------------------------------------------------------------------- a second copy inside the node (hpZ)


def traffic_with_a_second_copy(ranks_per_node: int, accumulation: int) -> dict[str, int]:
    for key in KEYS:
        unsupported.ONLY.pop(key, None)
    torch.manual_seed(0)
    model = Gpt()
    config = zero(3, gradient_accumulation_steps=accumulation, train_micro_batch_size_per_gpu=1)
    config["zero_optimization"]["zero_hpz_partition_size"] = ranks_per_node
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    for batch in batches(2, 32):
        for micro in range(accumulation):
            engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size(), micro, accumulation)))
            engine.step()
    padded = sum(group.layout.padded for unit in engine._flow.units for group in unit.groups)
    return {
        "padded": padded,
        "gather": engine.traffic().total(Kind.GATHER),
        "reduce": engine.traffic().total(Kind.REDUCE),
    }


@pytest.mark.parametrize("accumulation", [1, 2])
def test_with_a_second_copy_one_gather_a_step_leaves_the_node(ranks: Ranks, accumulation: int) -> None:
    for answer in ranks.run(4, traffic_with_a_second_copy, 2, accumulation):
        in_world = answer["padded"] * 4 * 3 // 4  # the first forward
        in_node = answer["padded"] * 4 // 2  # every later gather of the step
        assert answer["gather"] == in_world + (2 * accumulation - 1) * in_node
        assert answer["reduce"] == accumulation * in_world


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_a_second_copy_keeps_parity(ranks: Ranks, ranks_per_node: int) -> None:
    case = Case(steps=6, clip=0.5, config={"zero_optimization": {"zero_hpz_partition_size": ranks_per_node}})
    difference, name = distance(ranks.run(4, on_trial, [case], 3)[0][0], plainly(case)[0])
    assert difference < 1e-10, f"{name} differs by {difference}"
