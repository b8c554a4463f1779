"""The peaks of a plan: what is there at the highest instant, and which instant that is with all blocks."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from shardwell.memory import StateKind, Tier
from shardwell.plan import BlockModel, SimulatedMachine, SimulatedRanks, estimate
from shardwell.plan.decoder import DecoderSizes
from shardwell.plan.depths import TwoDepths
from shardwell.plan.estimate import _run, record
from shardwell.plan.instants import Instants, Lines
from shardwell.plan.models import decoder
from shardwell.plan.pipes import Pipe
from shardwell.plan.recording import ACTIVATIONS, Recording
from shardwell.plan.simulation import MOMENTS, StepCosts
from shardwell.plan.stages import of_stages

_ROUNDED = 4096  # bytes: a few blocks of the allocator
_BLOCK = 512
BELOW = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
ZEROPP = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


def config(stage: int, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
        "shardwell": {"bundle_size": 0},
        **more,
    }


def machine(ranks: int) -> SimulatedMachine:
    return SimulatedMachine(ranks=SimulatedRanks(0, ranks, 8))


def check(found: StepCosts, whole: StepCosts) -> None:
    """Compare a plan with a simulation of all blocks, but for a peak of the step that is said to be an estimate."""
    highest = max(found.peaks[f"{moment} {Tier.DEVICE.value}"] for moment in MOMENTS)
    assert sum(found.at_peak.values()) == highest
    for moment in MOMENTS[:2]:
        for tier in Tier:
            key = f"{moment} {tier.value}"
            assert abs(found.peaks[key] - whole.peaks[key]) <= _ROUNDED, key
    assert found.at_peak.keys() == whole.at_peak.keys()
    for state, size in whole.at_peak.items():
        assert abs(found.at_peak[state] - size) <= _ROUNDED, state


# ---------------------------------------------------------------------------------------------------- one simulation


def replayed(recording: Recording) -> dict[str, dict[str, int]]:
    """Return the states at the highest instant of each moment, from all changes since the engine was begun."""
    now: Counter[str] = Counter()
    moments = {number: name for name, number in recording.moments}
    looks, moment, found = set(recording.looks), "", dict[str, dict[str, int]]()
    for number in range(len(recording.changes) + 1):
        moment = moments.get(number, moment)
        if number in looks and (moment not in found or sum(now.values()) > sum(found[moment].values())):
            found[moment] = dict(now)
        if number < len(recording.changes) and recording.changes[number].tier is Tier.DEVICE:
            change = recording.changes[number]
            size = abs(change.size)
            if change.state == ACTIVATIONS:  # of what the engine counts later, the rounding stays an activation
                rounded = -(-size // _BLOCK) * _BLOCK
                now[ACTIVATIONS] += (rounded - size) * (1 if change.size > 0 else -1)
            now[change.part] += change.size
    return found


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(("stage", "zero"), [(0, {}), (2, {}), (3, {}), (3, ZEROPP), (3, BELOW)])
def test_the_states_at_a_peak_are_those_of_its_instant(stage: int, zero: dict[str, Any], recomputes: bool) -> None:
    sizes = DecoderSizes(4, 64, 4, 3000, mlp=128)
    model = decoder("m", sizes, 1, 64, recomputes=recomputes)
    costs, recording = record(model.build(4), config(stage, zero), machine(2), model.inputs)
    for moment, states in replayed(recording).items():
        assert costs.at_moments[moment] == {name: states.get(name, 0) for name in costs.at_moments[moment]}


def test_at_a_peak_in_the_backward_of_the_loss_there_are_no_gradients_yet() -> None:
    """All of them are there at the end of the backward, when the statistics alone have their peak."""
    model = decoder("m", DecoderSizes(4, 64, 4, 8000, mlp=128), 4, 256, recomputes=True)
    costs, _ = _run(model.build(4), config(3), machine(2), model.inputs, None)
    logits = 4 * 256 * 8000
    assert costs.at_peak["gradients"] < 1000
    assert costs.at_peak[ACTIVATIONS] > logits * 4


def test_a_tensor_that_the_engine_counts_later_was_of_its_state_from_the_beginning() -> None:
    instants = Instants([100, 612, 612], [0, 512, 512], [(100, 0, 0, 0)] * 3)
    instants.count_as(StateKind.GRADIENTS, 500, 1)
    states = {"parameters": 100, "gradients": 500, "optimizer": 0, "staging": 0, ACTIVATIONS: 12}
    assert instants.peak() == (612, states)
    assert (instants.activations[0], instants.states[0]) == (0, (100, 0, 0, 0))


# ------------------------------------------------------------------------------------------------------- more blocks


def course(*totals: int) -> Instants:
    return Instants(list(totals), list(totals), [(0, 0, 0, 0)] * len(totals))


def test_another_instant_may_be_the_highest_with_more_blocks() -> None:
    """A loss of 100 beside 1 for each block, and at the end 5 for each block."""
    few, more = course(0, 104, 4, 8, 12, 16, 20), course(0, 105, 5, 9, 13, 17, 21, 25)
    lines = Lines.of(few, more)
    assert lines is not None
    assert [lines.highest(times)[1] for times in (0, 1, 2, 36)] == [104, 105, 106, 200]


def test_moments_with_other_instants_have_no_lines() -> None:
    assert Lines.of(course(0, 5, 3, 9, 2), course(0, 7, 9, 4, 1, 6)) is None
    assert Lines.of(course(0, 5, 3), course(0, 5)) is None


# What is kept for each block is less than its gradients, and the loss is more than few of them: with few blocks the
# peak of the backward is at its beginning, and with all at its end, or in the step.
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "verified"), [(0, True), (2, False), (3, True), (3, False)])
def test_few_blocks_tell_a_peak_that_only_all_blocks_have(stage: int, verified: bool) -> None:
    model = decoder("m", DecoderSizes(100, 256, 4, 20_000, mlp=1024), 1, 128, recomputes=True)
    found = estimate(model, config(stage), machine(2), verified=verified)
    whole, _ = _run(model.build(100), config(stage), machine(2), model.inputs, None)
    assert not verified or any("4, 5 and 6 of 100 identical blocks" in note for note in found.notes)
    check(found.costs, whole)
    assert abs(found.costs.peaks["step device"] - whole.peaks["step device"]) <= _ROUNDED


def drawn(seed: int) -> tuple[BlockModel, dict[str, Any], SimulatedMachine, bool]:
    draw = random.Random(seed)
    stage, hidden = draw.choice([0, 1, 2, 3, 3]), draw.choice([64, 128, 256])
    zero = draw.choice([{}, {}, ZEROPP, BELOW]) if stage == 3 else draw.choice([{}, {}, {"overlap_comm": False}])
    more = {"gradient_accumulation_steps": draw.choice([1, 2]), "gradient_clipping": draw.choice([0.0, 1.0])}
    asked = config(stage, zero, bf16={"enabled": draw.random() < 0.7}, **more)
    if draw.random() < 0.3:
        del asked["shardwell"]  # small blocks are bundled
    sizes = DecoderSizes(draw.choice([36, 50]), hidden, 4, draw.choice([100, 20_000, 50_000]), mlp=2 * hidden)
    length, recomputes = draw.choice([16, 64, 256]), draw.random() < 0.6
    model = decoder("m", sizes, draw.choice([1, 4]), length, recomputes=recomputes)
    return model, asked, machine(draw.choice([2, 8, 64])), draw.random() < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_plan_of_few_blocks_has_the_peaks_and_states_of_all(seed: int) -> None:
    model, asked, there, verified = drawn(seed)
    found = estimate(model, asked, there, verified=verified)
    whole, _ = _run(model.build(model.layers), asked, there, model.inputs, None)
    check(found.costs, whole)


def test_the_peak_of_a_step_that_is_only_estimated_is_near() -> None:
    """It was a line through depths at which other numbers of blocks are stepped together, and could be below zero."""
    model = decoder("m", DecoderSizes(90, 256, 4, 20_000, mlp=512, gated=True), 1, 256, recomputes=False)
    report = estimate(model, config(3), machine(8))
    whole, _ = _run(model.build(90), config(3), machine(8), model.inputs, None)
    assert any("is an estimate" in note for note in report.notes)
    found, size = report.costs.peaks["step device"], whole.peaks["step device"]
    assert abs(found - size) < 0.2 * size
    assert 2 * found < report.peak(Tier.DEVICE)
    check(report.costs, whole)


# Few blocks of the first have the peak of their backward at another instant than all.
@pytest.mark.slow
@pytest.mark.parametrize(("stages", "per_stage", "hidden", "ranks"), [(4, 12, 256, 16), (3, 10, 64, 6)])
def test_a_stage_of_a_pipeline_has_the_peaks_and_states_of_all_its_blocks(
    stages: int, per_stage: int, hidden: int, ranks: int
) -> None:
    sizes = DecoderSizes(stages * per_stage, hidden, 4, 20_000, mlp=2 * hidden)
    asked = config(1, pipeline={"stages": stages}, gradient_accumulation_steps=8)
    pipe = Pipe.of(decoder("m", sizes, 1, 128, recomputes=True), asked, machine(ranks))
    found, notes = of_stages(pipe, is_below=False, verified=True)
    rank = int(notes[0].split("rank of stage ")[1].split(",")[0])
    whole, _ = of_stages(pipe, is_below=True, verified=True)
    assert "few blocks" in notes[0]
    assert rank in (0, 1, stages - 1)
    check(found, whole)


def test_a_third_depth_that_is_not_on_the_lines_is_noticed() -> None:
    model = decoder("m", DecoderSizes(40, 64, 4, 100, mlp=128), 1, 64, recomputes=True)
    few, more, third, other = (
        _run(model.build(depth), config(2), machine(2), model.inputs, None)[0] for depth in (4, 5, 6, 8)
    )
    two = TwoDepths.of(few, more)
    assert two.is_confirmed(third, 2, 36, with_step=False)
    assert not two.is_confirmed(other, 2, 36, with_step=False)
    high = replace(third, peaks={**third.peaks, "backward device": third.peaks["backward device"] + 5000})
    assert not two.is_confirmed(high, 2, 36, with_step=False)


def test_a_report_has_no_instants() -> None:
    model = decoder("m", DecoderSizes(2, 64, 4, 100, mlp=128), 1, 16, recomputes=True)
    report = estimate(model, config(3), machine(2))
    assert not report.costs.instants
    assert "instants" not in json.loads(report.json())


def test_a_report_says_in_which_moment_the_peak_is() -> None:
    sizes = DecoderSizes(2, 64, 4, 100, mlp=128)
    for length, moment in ((8, "step"), (2048, "backward")):
        report = estimate(decoder("m", sizes, 1, length, recomputes=False), config(0), machine(2))
        assert f"┃ in {moment} " in str(report).partition("the device at its peak")[2]
