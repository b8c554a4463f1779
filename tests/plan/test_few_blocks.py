"""A plan of few blocks is that of all: what depends on the whole model is decided as if all blocks were there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwell.optim import param_slices
from shardwell.plan import SimulatedMachine, SimulatedRanks, estimate, update_chunks
from shardwell.plan.decoder import DecoderSizes
from shardwell.plan.estimate import _run
from shardwell.plan.models import decoder
from shardwell.sharding import bundle

GPT = DecoderSizes(36, 256, 4, 1000, positions=64)
GATED = DecoderSizes(36, 256, 4, 1000, mlp=512, gated=True)
ON_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
_ROUNDED = 4096  # bytes: a few blocks of the allocator


# With 65,536 ranks the small parameters of all blocks are padded to many times their size; with room for 20,000
# elements in the root, those of one size are in it and the others are in their blocks. Small parameters are at most 1%
# of a model, of which few blocks alone would be another share. With 2 and 8 ranks all small parameters of few blocks
# are in the first rank's shard, and those of all blocks are not.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "ranks", "zero", "largest"),
    [
        (GPT, 2, {}, None),
        (GATED, 8, {"stage": 2}, None),
        (GPT, 64, {}, None),
        (GPT, 65_536, {}, None),
        (GPT, 65_536, {}, 20_000),
        (GATED, 65_536, {}, None),
        (GATED, 64, ON_HOST, None),
        (GATED, 65_536, {"stage3_model_persistence_threshold": 9000}, None),
    ],
)
def test_small_parameters_of_few_blocks_are_shared_as_those_of_all(
    sizes: DecoderSizes, ranks: int, zero: dict[str, Any], largest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if largest is not None:
        monkeypatch.setattr(bundle, "LARGEST_BUNDLE", largest)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, **zero},
        "shardwell": {"bundle_size": 0},
    }
    model, machine = decoder("few", sizes, 1, 32, recomputes=True), SimulatedMachine(ranks=SimulatedRanks(0, ranks, 8))
    few = estimate(model, config, machine)
    depths = "9, 10 and 11" if zero is ON_HOST else "4, 5 and 6"
    note = next(
        one for one in few.notes if one.startswith(f"{depths} of {sizes.layers} identical blocks were simulated")
    )
    whole, _ = _run(model.build(sizes.layers), config, machine, model.inputs, None)
    for name in ("num_parameters", "rest", "traffic", "calls", "copies"):
        assert getattr(few.costs, name) == getattr(whole, name), name
    for moment in ("forward", "backward"):
        assert few.costs.peaks[f"{moment} device"] == whole.peaks[f"{moment} device"]
    if "in the step alone" not in note:
        assert abs(few.costs.peaks["step device"] - whole.peaks["step device"]) <= _ROUNDED
    if "in the step alone" in note:
        highest = max(whole.peaks[f"{moment} device"] for moment in ("forward", "backward"))
        assert abs(few.costs.peaks["step device"] - whole.peaks["step device"]) < 0.2 * whole.peaks["step device"]
        assert whole.peaks["step device"] < highest


@pytest.mark.parametrize("together", [2, 9])
@pytest.mark.parametrize(("stage", "most"), [(1, 128), (3, 128), (3, 0)])
def test_the_peak_of_a_step_is_that_of_the_blocks_that_are_stepped_together(
    stage: int, most: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three depths of few blocks may be on a line, and more blocks not: the next ones are stepped after them."""
    monkeypatch.setattr(update_chunks, "_MOST", most)
    numel = sum(one.numel() for one in decoder("", GATED, 1, 32, recomputes=True).build(1).blocks.parameters())
    monkeypatch.setattr(param_slices, "_CHUNK", (together - 1) * numel // 8 + 1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        "shardwell": {"bundle_size": 0},
    }
    sizes = replace(GATED, layers=24)
    model, machine = decoder("few", sizes, 1, 32, recomputes=True), SimulatedMachine(ranks=SimulatedRanks(0, 8, 8))
    few = estimate(model, config, machine)
    assert f"of {sizes.layers} identical blocks were simulated" in few.notes[-1]
    whole, _ = _run(model.build(sizes.layers), config, machine, model.inputs, None)
    assert few.costs.rest == whole.rest
    assert abs(few.costs.peaks["step device"] - whole.peaks["step device"]) <= _ROUNDED
    assert abs(few.costs.at_moments["step"]["gradients"] - whole.at_moments["step"]["gradients"]) <= _ROUNDED


@pytest.mark.slow
@pytest.mark.parametrize(("together", "verified"), [(13, True), (13, False), (3, False), (2, True)])
def test_blocks_that_are_one_unit_stay_together(together: int, verified: bool) -> None:
    """With few blocks a bundle has few of them, and all numbers would be on a line that ends with the first bundle."""
    sizes = replace(GATED, layers=35)
    numel = sum(one.numel() for one in decoder("", GATED, 1, 32, recomputes=True).build(1).blocks.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
        "shardwell": {"bundle_size": together * numel},
    }
    model, machine = decoder("few", sizes, 1, 32, recomputes=True), SimulatedMachine(ranks=SimulatedRanks(0, 8, 8))
    few = estimate(model, config, machine, verified=verified).costs
    whole, _ = _run(model.build(sizes.layers), config, machine, model.inputs, None)
    for name in ("rest", "traffic", "calls", "copies", "largest_unit"):
        assert getattr(few, name) == getattr(whole, name), name
    assert all(abs(few.peaks[key] - size) <= _ROUNDED for key, size in whole.peaks.items())
