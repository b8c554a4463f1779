"""`engine.plan()`: the prediction of a running job equals what its statistics count, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.errors import ShardwellError
from shardwell.memory import Tier
from shardwell.plan import compare
from tests.support.internals import memory_stats_of
from tests.support.models import Gpt, batches, share
from tests.support.ranks import Ranks


def config(zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    block = {"stage3_param_persistence_threshold": 0, **zero}
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": block, "shardwell": {"bundle_size": 0}, **more}


def compared(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        model = Gpt()
        engine = shardwell.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=case).engine
        batch = share(batches(1, 4)[0], dist.get_rank(), dist.get_world_size())
        losses = []
        for _ in range(3):
            memory_stats_of(engine).reset_peak()  # what building took is no part of a step
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        if engine.optimizer is not None:
            engine.optimizer.settle()
        report = engine.plan((batch,))
        after = engine(batch)
        engine.backward(after)
        engine.step()
        found.append({**report.as_dict(), "text": str(report), "losses": [*losses, float(after.detach())]})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_the_prediction_is_what_the_job_counts(ranks: Ranks, size: int) -> None:
    cases = [config({"stage": stage}) for stage in (0, 2, 3)]
    cases += [config({"stage": 3, "offload_optimizer": {"device": "cpu"}}), config({"stage": "auto"})]
    for found in ranks.run(size, compared, cases):
        for case, one in zip(cases, found, strict=True):
            for tier in one["tiers"]:
                words = f"{case['zero_optimization']}: {tier}"
                assert tier["rest"] == tier["counted_rest"], words
                if tier["tier"] == "device":
                    assert tier["peak"] == tier["counted_peak"], words
                    assert tier["allocated"] >= tier["peak"], words
                    assert tier["counted_allocated"] is None, words
                else:  # staging buffers whose number depends on time are counted as the most that there can be
                    assert tier["peak"] >= tier["counted_peak"], words
            for kind, pair in one["traffic"].items():
                assert pair["predicted"] == pair["counted"], (case, kind)
            assert "planned" in one["text"]
            assert one["losses"] == sorted(one["losses"], reverse=True)  # the job trains on after it was planned


def test_simulated_engines_of_a_comparison_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = Gpt(), batches(1, 2)[0]
    optimizer = torch.optim.AdamW(model.parameters())
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config({"stage": 2})).engine
    engine.backward(engine(batch))
    engine.step()
    with caplog.at_level("INFO", "shardwell"):
        caplog.clear()
        engine.plan((batch,))
        assert caplog.records == []


def test_an_engine_without_an_optimizer_has_no_steps_to_compare() -> None:
    engine = shardwell.initialize(model=Gpt(), config=config({"stage": 2})).engine
    with pytest.raises(ShardwellError, match="no optimizer"):
        compare(engine, (batches(1, 2)[0],))


def test_tiers_have_peaks_of_their_own() -> None:
    model = Gpt()
    asked = config({"stage": 2, "offload_optimizer": {"device": "cpu"}})
    engine = shardwell.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=asked).engine
    engine.backward(engine(batches(1, 2)[0]))
    engine.step()
    report = engine.memory()
    peaks = report.peaks()
    assert peaks[Tier.DEVICE] == report.total(tier=Tier.DEVICE, at_peak=True)
    assert sum(peaks.values()) == report.total(at_peak=True)
