"""Pain: `no_sync` is refused at stages 2 and 3, where every micro-step reduces."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

import shardwell
from shardwell.parallel import TrafficKind
from tests.support.internals import trainable_groups_of
from tests.support.models import batches, share, whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.training import Case, distance, plainly

MICRO_STEPS, ROWS = 4, 48
CASE = Case(steps=2, accumulation=MICRO_STEPS, optimizer="SGD", options={"lr": 0.1})


def train(stage: int, unsynced: bool) -> dict[str, Any]:
    model = CASE.build()
    config = zero(stage, gradient_accumulation_steps=MICRO_STEPS)
    engine, *_ = shardwell.initialize(model=model, optimizer=CASE.make_optimizer(model), config=config)
    for batch in batches(CASE.steps, ROWS):
        for micro in range(MICRO_STEPS):
            rows = share(batch, dist.get_rank(), dist.get_world_size(), micro, MICRO_STEPS)
            with engine.no_sync() if unsynced and micro + 1 < MICRO_STEPS else contextlib.nullcontext():
                engine.backward(engine(rows))
            engine.step()
    groups = trainable_groups_of(engine)
    return {
        "parameters": whole_parameters(model),
        "calls": engine.traffic().calls[TrafficKind.REDUCE_SCATTER],
        "bytes": engine.traffic().total(TrafficKind.REDUCE_SCATTER),
        "groups": len(groups),
        "one": sum(group.layout.padded * 8 // 2 for group in groups),
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_sync_works_at_every_stage_and_reduces_once(ranks: Ranks, stage: int) -> None:
    """It asserts, or is ignored; here gradients stay local and one reduce moves them all."""
    for answer in ranks.run(2, train, stage, True):
        difference, name = distance(answer["parameters"], plainly(CASE)[0])
        assert difference < 1e-12, f"{name} differs by {difference}"
        assert answer["calls"] == answer["groups"]
        assert answer["bytes"] == answer["one"]


@pytest.mark.parametrize("stage", [2, 3])
def test_without_it_these_stages_reduce_in_every_micro_step(ranks: Ranks, stage: int) -> None:
    """What `no_sync` saves, so that the count above means something."""
    for answer in ranks.run(2, train, stage, False):
        assert answer["bytes"] == MICRO_STEPS * answer["one"]


def step_after_no_sync(stage: int) -> dict[str, Any]:
    """The boundary itself is inside: the step has to reduce what was kept."""
    model = CASE.build()
    engine, *_ = shardwell.initialize(model=model, optimizer=CASE.make_optimizer(model), config=zero(stage))
    with engine.no_sync():
        engine.backward(engine(share(batches(1, ROWS)[0], dist.get_rank(), dist.get_world_size())))
    engine.step()
    return whole_parameters(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_reduces_what_no_sync_kept(ranks: Ranks, stage: int) -> None:
    """Gradients of a boundary inside `no_sync` are lost or differ between ranks; here the step averages them."""
    expected = plainly(replace(CASE, steps=1, accumulation=1))[0]
    for found in ranks.run(2, step_after_no_sync, stage):
        difference, name = distance(found, expected)
        assert difference < 1e-12, f"{name} differs by {difference}"
