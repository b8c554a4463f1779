"""The time and memory of pipelines: operations in virtual time, in the order of the engine's own schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from shardwell.optim import param_slices
from shardwell.plan import SimulatedMachine, SimulatedRanks, estimate
from shardwell.plan import stages as stages_module
from shardwell.plan.decoder import DecoderSizes
from shardwell.plan.devices import gpu, speeds_of
from shardwell.plan.models import decoder
from shardwell.plan.pipe_time import time_of_pipe
from shardwell.plan.pipes import Pipe, StagePart
from shardwell.plan.simulation import BlockModel, StepCosts, are_alike
from shardwell.plan.step_time import BUBBLE, StepTime

# A vocabulary of few tokens: the first and the last stage hardly compute longer than those between.
SIZES = DecoderSizes(16, 512, 4, 64, mlp=1024, kv_heads=2, gated=True)


def machine(ranks: int = 4, **changes: Any) -> SimulatedMachine:
    speeds = speeds_of(gpu("a100"), None, "nvme-gen4", 1)
    free = {"kernel_seconds": 0.0, "launch_seconds": 0.0, "inside_seconds": 0.0, "between_seconds": 0.0}
    there = SimulatedMachine(1e12, ranks=SimulatedRanks(0, ranks, ranks))
    return replace(there, speeds=replace(speeds, **{**free, **changes}))


def config(stages: int, number: int, **block: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": number,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"stages": stages, **block},
    }


def model(sizes: DecoderSizes = SIZES) -> BlockModel:
    return decoder("tiny", sizes, 1, 256, recomputes=False)


def timed(settings: dict[str, Any], on: SimulatedMachine) -> StepTime:
    return time_of_pipe(Pipe.of(model(), settings, on), verified=False)[0]


@pytest.fixture(scope="module")
def four() -> StepTime:
    return timed(config(4, 8), machine(inside=1e18))


def test_a_bubble_is_that_of_the_formula_where_stages_and_messages_are_alike(four: StepTime) -> None:
    passes = [one for one in four.events if one.name.startswith(("forward", "backward"))]
    assert len(passes) == 16
    update = four.events[-1]
    idle = four.by_resource[BUBBLE].exposed / (four.seconds - (update.end - update.begin))
    assert idle == pytest.approx(3 / (8 + 3), abs=0.05)  # of 1f1b: the stages at the ends have an embedding and a loss


def test_every_moment_of_a_pipeline_has_a_reason(four: StepTime) -> None:
    assert sum(one.exposed for one in four.by_resource.values()) == pytest.approx(four.seconds)
    spans = sorted((one.begin, one.end) for one in (*four.events, *four.waits))
    assert spans[0][0] == 0.0
    assert spans[-1][1] == pytest.approx(four.seconds)
    assert all(end == pytest.approx(begin) for (_, end), (begin, _) in pairwise(spans))
    assert four.samples == 8
    assert four.timeline().spans


def test_messages_take_their_bytes_over_the_link(four: StepTime) -> None:
    fast, slow = (timed(config(4, 8), machine(inside=rate)) for rate in (1e18, 1e8))
    assert fast.seconds == four.seconds
    # The first micro-batch passes all stages and comes back, and no step is shorter than that.
    assert slow.seconds > fast.seconds + 6 * (256 * 512 * 2) / 1e8


@pytest.mark.slow
def test_more_micro_batches_and_weights_that_are_late_make_the_bubble_smaller(four: StepTime) -> None:
    more = timed(config(4, 32), machine(inside=1e18))
    late = timed(config(4, 8, schedule="zb-h1"), machine(inside=1e18))
    shares = [one.by_resource[BUBBLE].exposed / one.seconds for one in (more, late, four)]
    assert shares[0] < shares[1] < shares[2]


def test_few_blocks_and_micro_batches_of_a_stage_predict_all() -> None:
    pipe = Pipe.of(model(replace(SIZES, layers=12)), config(3, 5), replace(machine(3), speeds=None))
    found = stages_module._Lines.of(pipe, 1).at(StagePart(pipe.num_blocks(1), 2, 5))
    assert are_alike(found, stages_module._of_whole(pipe, 1))


def test_a_batch_of_all_ranks_says_how_many_micro_batches_a_pipeline_has() -> None:
    settings = {key: value for key, value in config(2, 1).items() if key != "gradient_accumulation_steps"}
    report = estimate(model(), {**settings, "train_batch_size": 8}, machine(2), verified=False)
    assert report.time is not None
    assert report.time.samples == 8
    assert report.time.tokens == 8 * 256
    assert any("a step has 8 micro-batches" in note for note in report.notes)


def of_worst(pipe: Pipe, *, verified: bool) -> tuple[StepCosts, StepCosts, str]:
    """Return a plan of a pipeline, the same stage simulated whole, and the plan's first note."""
    found, notes = stages_module.of_stages(pipe, is_below=False, verified=verified)
    rank = int(notes[0].split("rank of stage ")[1].split(",")[0])
    return found, stages_module._folded(stages_module._of_whole(pipe, rank)), notes[0]


@pytest.mark.slow
@pytest.mark.parametrize(("together", "verified"), [(2, True), (5, False)])
def test_the_step_of_a_stage_has_the_peak_of_the_blocks_that_are_stepped_together(
    together: int, verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = replace(SIZES, layers=27)
    numel = sum(one.numel() for one in model(sizes).build(1).blocks.parameters())
    monkeypatch.setattr(param_slices, "_CHUNK", (together - 1) * numel // 4 + 1)
    short = decoder("short", sizes, 1, 8, recomputes=True)  # states have the peak, and not activations
    settings = {**config(3, 5), "shardwell": {"bundle_size": 0}}
    few, whole, note = of_worst(Pipe.of(short, settings, replace(machine(12), speeds=None)), verified=verified)
    assert "few blocks" in note
    assert few.rest == whole.rest
    assert abs(few.peaks["step device"] - whole.peaks["step device"]) <= 4096
    assert abs(few.at_moments["step"]["gradients"] - whole.at_moments["step"]["gradients"]) <= 4096


@pytest.mark.parametrize("verified", [True, False])
def test_stages_whose_blocks_are_one_unit_are_simulated_whole(verified: bool) -> None:
    """Small blocks of a stage are bundled at stages 0 and 1, and few of them are another bundle."""
    short = decoder("short", replace(SIZES, layers=18), 1, 8, recomputes=True)
    few, whole, _ = of_worst(Pipe.of(short, config(3, 5), replace(machine(12), speeds=None)), verified=verified)
    assert few == whole
