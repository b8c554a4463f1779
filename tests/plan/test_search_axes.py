"""The search of `--auto` over sequence axes and pipelines: when they win, with which keys, and why they do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwell.plan import SimulatedMachine, SimulatedRanks
from shardwell.plan.decoder import DecoderSizes
from shardwell.plan.devices import gpu, speeds_of
from shardwell.plan.models import PlanModel, decoder
from shardwell.plan.search import Search

SIZES = DecoderSizes(2, 256, 4, 512, mlp=512, kv_heads=2, gated=True)
MODEL = PlanModel("tiny", lambda batch, length, again: decoder("tiny", SIZES, batch, length, recomputes=again))
BASE: dict[str, Any] = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}


def machine(ranks: int, per_node: int, device_bytes: float, **speeds: float) -> SimulatedMachine:
    found = replace(speeds_of(gpu("a100"), None, "nvme-gen4", 1), **speeds)  # type: ignore[arg-type]
    return replace(SimulatedMachine(device_bytes, ranks=SimulatedRanks(0, ranks, per_node)), speeds=found)


@pytest.mark.slow
def test_a_sequence_that_no_rank_has_room_for_is_shared() -> None:
    needed = MODEL.report({**BASE, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}},
                          machine(2, 2, 1e12), 2048, True, verified=False).costs.peaks["backward device"]  # fmt: skip
    search = Search(MODEL, BASE, machine(2, 2, 0.8 * needed / 0.94), 2048, recomputes=True)
    found = search.run()
    assert found.best is not None
    kinds = [one.kind for one in found.plans]
    assert any(one.sequence == 2 for one in kinds)
    assert all(one.rows_shared_by > 1 or one.depth for one in kinds)  # or states are on the host
    shared = next(one for one in found.plans if one.kind.sequence == 2)
    assert shared.report.config["sequence_parallel_size"] == 2
    assert "2 sequence ranks" in str(shared)
    there = [one for one in found.dropped if not (one.kind.sequence or one.kind.tensor or one.kind.pipe)]
    assert any("with a micro-batch of 1 it needs" in one.why for one in there)


@pytest.mark.slow
def test_a_sequence_is_not_shared_where_a_rank_has_room_for_it() -> None:
    found = Search(MODEL, BASE, machine(2, 2, 1e9), 256, recomputes=False, micro_batch=1).run()
    whys = {one.why for one in found.dropped if one.kind.sequence == 2}
    assert whys == {"with fewer ranks along the sequence it has room, and moves less"}


@pytest.mark.slow
def test_a_pipeline_wins_over_slow_links_and_its_configuration_is_ready() -> None:
    search = Search(MODEL, {**BASE, "train_batch_size": 16}, machine(2, 1, 1e9, between=2e7), 128, recomputes=False)
    found = search.run()
    assert found.best is not None
    assert found.best.kind.pipe == 2
    config = found.config()
    assert config["pipeline"] == {"stages": 2}
    assert config["train_batch_size"] == 16
    assert "gradient_accumulation_steps" not in config
    assert found.best.report.time is not None
    assert found.best.report.time.samples == 16
    assert "a pipeline of 2 stages" in str(found)
    # One rank in each node: what ZeRO sends takes the slow link, too.
    assert all("link inside" not in one.report.time.by_resource for one in found.plans if one.report.time)


@pytest.mark.slow
def test_a_pipeline_over_fast_links_is_told_its_bubble() -> None:
    found = Search(MODEL, {**BASE, "train_batch_size": 8}, machine(2, 2, 1e9), 1024, recomputes=False).run()
    assert found.best is not None
    assert found.best.kind.pipe is None
    told = [one.why for one in found.dropped if one.kind.pipe]
    told += [why for one, why in found.reasons() if one.kind.pipe]
    assert told
    assert any("bubble" in why for why in told)
