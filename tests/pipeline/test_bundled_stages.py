"""The units of a pipeline stage: few and large where gradients are reduced once a step, and never of two stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.parallel import TrafficKind
from tests.support.pipelines import chain, next_token_loss, pipeline_config, plain, stream
from tests.support.ranks import Ranks
from tests.support.wire_counter import WireCounter

STEPS = 3


def made() -> torch.nn.Module:
    torch.manual_seed(0)
    return chain(6).double()


def trained(config: dict[str, Any]) -> dict[str, Any]:
    model = shardwell.pipeline.split(made(), loss_fn=next_token_loss)
    engine: Any = shardwell.initialize(model=model, config=config).engine
    batches = stream(STEPS, engine.data_rank)
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS - 1)]
    calls = engine.traffic().calls
    with WireCounter(dist.get_rank(), dist.get_world_size()) as wire:
        losses.append(float(engine.train_batch(batches)))
    found = {
        "sums": wire.calls["allreduce_"],
        "losses": losses,
        "parameters": engine.state_dict(),
        "units": [unit.name for unit in engine.units],
        "calls": [calls.get(kind, 0) for kind in (TrafficKind.REDUCE_SCATTER, TrafficKind.PUBLISH)],
    }
    engine.destroy(whole=False)
    return found


def several(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [trained(config) for config in configs]


def test_bundles_have_modules_of_one_stage(ranks: Ranks) -> None:
    """With two chunks a rank has layers of two stages, with those of the other rank between them."""
    configs = [pipeline_config(stage, "interleaved", shardwell={"bundle_size": 1 << 20}) for stage in (1, 3)]
    expected = plain(made(), STEPS, data_size=1)
    for rank in ranks.run(2, several, configs):
        for found in rank:
            assert found["losses"] == pytest.approx(expected["losses"], abs=1e-10)
            for name, value in found["parameters"].items():
                assert abs(torch.as_tensor(value) - expected["parameters"][name]).max() < 1e-10, name
            assert not [name for name in found["units"] if name in ("0-5", "1-5", "2-7", "2-8", "3-8")]


def test_a_stage_is_reduced_and_published_at_once(ranks: Ranks) -> None:
    """At ZeRO stage 1 each rank of a pipeline waits for its replicas twice a step, not twice for each block."""
    small = {"zero_optimization": {"stage": 1}}
    configs = [pipeline_config(1, "1f1b", **small), pipeline_config(1, "1f1b", **small, shardwell={"bundle_size": 0})]
    for few, many in ranks.run(4, several, configs):
        assert few["calls"] == [1, 1]
        assert few["units"] == [""]
        assert few["sums"] == 2  # norm, loss and what ranks compare: over the replicas of a stage, and over the stages
        assert min(many["calls"]) >= 4
        assert few["losses"] == pytest.approx(many["losses"], abs=1e-12)
