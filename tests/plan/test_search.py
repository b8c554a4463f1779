"""The search of `--auto` and the answers of `--explain`: what wins, why, and that simulations agree with divisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwell.errors import ConfigError
from shardwell.memory import Tier
from shardwell.plan import SimulatedMachine, SimulatedRanks
from shardwell.plan.changes import PlanChoice
from shardwell.plan.decoder import DecoderSizes
from shardwell.plan.devices import gpu, speeds_of
from shardwell.plan.explain import Answer, Explanation
from shardwell.plan.models import PlanModel, decoder
from shardwell.plan.report import RESERVE
from shardwell.plan.search import AutoPlan, Search
from shardwell.plan.speed import PlanSpeed
from shardwell.plan.structure import minimal, structure_classes

SIZES = DecoderSizes(2, 256, 4, 512, mlp=512, kv_heads=2, gated=True)
MODEL = PlanModel("tiny", lambda batch, length, again: decoder("tiny", SIZES, batch, length, recomputes=again))
BASE: dict[str, Any] = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}


def machine(ranks: int, per_node: int, device_bytes: float = 16e6, **more: Any) -> SimulatedMachine:
    speeds = speeds_of(gpu("a100"), None, "nvme-gen4", 1)
    return replace(SimulatedMachine(device_bytes, ranks=SimulatedRanks(0, ranks, per_node), **more), speeds=speeds)


@pytest.fixture(scope="module")
def two_nodes() -> AutoPlan:
    return Search(MODEL, BASE, machine(4, 2), 32).run()


@pytest.mark.slow
def test_the_first_plan_fits_and_one_more_sequence_does_not(two_nodes: AutoPlan) -> None:
    best = two_nodes.best
    assert best is not None
    assert best.report.fits
    for one in (one for one in two_nodes.plans if one.kind.pipe is None):  # whose bubble larger micro-batches lengthen
        config = {**one.report.config, "train_micro_batch_size_per_gpu": one.micro_batch + 1}
        again = one.kind.way.recomputes
        assert not MODEL.report(config, replace(one.report.machine, speeds=None), 32, again).fits, str(one)


@pytest.mark.slow
def test_plans_are_ordered_by_the_seconds_of_a_token(two_nodes: AutoPlan) -> None:
    assert two_nodes.best is not None
    seconds = [one.speed.seconds for one in two_nodes.plans[1:]]
    assert seconds == sorted(seconds)
    assert two_nodes.best.speed.seconds <= 1.12 * min(one.speed.seconds for one in two_nodes.plans)
    assert all(one.report.time is not None for one in two_nodes.plans)
    assert all("times the time of a token" in why for _, why in two_nodes.reasons())


@pytest.mark.slow
def test_everything_that_is_not_a_plan_has_a_reason(two_nodes: AutoPlan) -> None:
    classes = structure_classes(machine(4, 2), 1, None, has_disk=False, has_axes=True, layers=SIZES.layers)
    assert {(one.tensor, one.sequence, one.pipe) for one in classes} == {
        *((None, None, None), (2, None, None), (None, 2, None), (None, None, 2), (2, None, 2))
    }
    known = [one.kind for one in two_nodes.plans] + [one.kind for one in two_nodes.dropped]
    assert sorted(map(str, classes)) == sorted(str(one) for one in known if one.keeps)
    assert {replace(one, keeps=True) for one in known} == set(classes)  # offloaded state may also be all on the host
    assert all(one.why for one in two_nodes.dropped)


@pytest.mark.slow
def test_the_configuration_has_only_keys_that_differ_from_defaults(two_nodes: AutoPlan) -> None:
    found = two_nodes.config()
    assert found["optimizer"] == BASE["optimizer"]
    assert found["train_micro_batch_size_per_gpu"] > 1
    assert set(found) == {"bf16", "optimizer", "train_micro_batch_size_per_gpu", "zero_optimization"}
    whole = {**BASE, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
    whole["zero_optimization"] = {"stage": 3, "zero_quantized_weights": False, "offload_param": {"device": "none"}}
    assert minimal(whole, 2) == {**BASE, "zero_optimization": {"stage": 3}}


def test_states_go_down_as_far_as_they_must() -> None:
    size = sum(one.numel() for one in MODEL.whole().parameters())
    there = replace(machine(1, 1, 8.0 * size + 1e6, host_bytes=1e9), speeds=None)  # without speeds, bytes are the order
    found = Search(MODEL, BASE, there, 8, micro_batch=1).run()
    assert found.best is not None
    assert found.best.kind.way.place.optimizer is Tier.HOST
    assert any("states alone take" in one.why for one in found.dropped)


def test_nothing_fits_is_said_with_reasons() -> None:
    found = Search(MODEL, BASE, machine(2, 2, 1e5), 8).run()
    assert found.best is None
    assert "Nothing that was tried fits." in str(found)
    assert found.as_dict()["fits"] is False


@pytest.mark.slow
def test_a_batch_of_all_ranks_is_divided() -> None:
    base = {**BASE, "train_batch_size": 24}
    found = Search(MODEL, base, replace(machine(4, 4, 1e9), speeds=None), 8, recomputes=False).run()
    assert found.best is not None
    rows_of_rank = 6 * found.best.kind.rows_shared_by  # ranks along axes train on the same rows
    assert rows_of_rank % found.best.micro_batch == 0
    with pytest.raises(ConfigError, match="cannot share evenly"):
        Search(MODEL, {**BASE, "train_batch_size": 25}, machine(6, 3, 1e9), 8).run()


@pytest.mark.slow
def test_a_batch_that_is_too_small_for_all_ranks_is_shared_along_an_axis() -> None:
    found = Search(MODEL, {**BASE, "train_batch_size": 2}, machine(4, 2, 1e9), 8, recomputes=False).run()
    assert found.best is not None
    assert all(one.kind.rows_shared_by > 1 for one in found.plans)
    cut = next(one for one in found.plans if one.kind.tensor == 2)
    assert cut.report.config["tensor_parallel"] == {"autotp_size": 2}
    assert "2 tensor ranks" in str(found)
    assert any("4 ranks cannot share evenly" in one.why for one in found.dropped)


@pytest.mark.slow
def test_axes_that_are_given_are_kept() -> None:
    base = {**BASE, "sequence_parallel_size": 2}
    found = Search(MODEL, base, machine(4, 2, 1e9), 32, recomputes=False, micro_batch=1).run()
    assert found.best is not None
    assert {one.kind.tensor for one in [*found.plans, *found.dropped]} == {None}
    assert found.config()["sequence_parallel_size"] == 2


def test_tokens_that_tensor_ranks_share_count_once() -> None:
    speeds = []
    for tensor in (1, 2):
        config = {**BASE, "train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": tensor}}
        report = MODEL.report(config, machine(2, 2, 1e9), 32, False)
        assert report.time is not None
        speeds.append((PlanSpeed.of(report, 32, recomputes=False).seconds, report.time))
    for seconds, time in speeds:
        assert seconds == pytest.approx(2 * time.seconds / time.tokens)  # of one of two ranks


# ---------------------------------------------------------------------------------------------------------- answers


def answers(config: dict[str, Any], on: SimulatedMachine, recomputes: bool = True) -> list[Answer]:
    first = PlanChoice("", {**BASE, "train_micro_batch_size_per_gpu": 1, **config}, on, recomputes)
    return list(Explanation(first, MODEL.report(first.config, on, 128, recomputes), 128, MODEL).answers())


@pytest.mark.slow
def test_answers_come_with_figures_of_simulations() -> None:
    found = {one.question: one for one in answers({"zero_optimization": {"stage": 3}}, machine(4, 2))}
    batch = next(one for question, one in found.items() if "largest micro-batch" in question).figures["micro_batch"]
    config = {**BASE, "zero_optimization": {"stage": 3}}
    there = replace(machine(4, 2), speeds=None)
    assert MODEL.report({**config, "train_micro_batch_size_per_gpu": batch}, there, 128, True).fits
    assert not MODEL.report({**config, "train_micro_batch_size_per_gpu": batch + 1}, there, 128, True).fits
    longest = found["What is the longest sequence, one at a time?"].figures["sequence"]
    alone = {**config, "train_micro_batch_size_per_gpu": 1}
    assert MODEL.report(alone, there, longest, True).fits
    assert not MODEL.report(alone, there, longest + 128, True).fits
    assert found["Does it fit?"].figures["fits"]
    kept = found["Which activation checkpointing?"].figures
    assert kept["recomputed"] <= kept["kept"]
    shards = found["Are secondary shards in each node (hpZ) worth it?"]
    assert shards.figures["between_with"] < shards.figures["between"]
    assert "A step takes" in shards.words
    assert found["Is optimizer state on the host worth it?"].figures["freed"] > 0
    node = found["What would one more node bring?"].figures
    assert node["gpus"] == 6
    assert node["states"] > 0


def test_a_change_without_which_a_plan_does_not_fit_is_not_called_worthless() -> None:
    """It is slower than a plan that has no room, which nobody can run."""
    asked = {"zero_optimization": {"stage": 3}}
    whole = MODEL.report({**BASE, **asked, "train_micro_batch_size_per_gpu": 1}, machine(4, 2), 128, True)
    offloaded = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}
    below = MODEL.report(
        {**BASE, "zero_optimization": offloaded, "train_micro_batch_size_per_gpu": 1}, machine(4, 2), 128, True
    )
    room = (whole.peak(Tier.DEVICE) + below.peak(Tier.DEVICE)) / 2 / (1 - RESERVE)
    found = {one.question: one for one in answers(asked, replace(machine(4, 2), device_bytes=room))}
    words = found["Is optimizer state on the host worth it?"].words
    assert "the plan fits with it, and not without it" in words
    assert "not worth it" not in words


@pytest.mark.slow
def test_a_change_that_a_configuration_does_not_admit_is_an_answer() -> None:
    cut = {"zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 2}}
    found = {one.question: one for one in answers(cut, machine(4, 2))}
    assert (
        "it is refused: zero_optimization.zero_hpz_partition_size"
        in found["Are secondary shards in each node (hpZ) worth it?"].words
    )
    assert found["What would one more node bring?"].figures["gpus"] == 6


@pytest.mark.slow
def test_what_does_not_fit_is_told_the_smallest_change() -> None:
    size = sum(one.numel() for one in MODEL.whole().parameters())
    found = answers({"zero_optimization": {"stage": 0}}, machine(4, 4, 9.0 * size))[0]
    assert "Why does it not fit" in found.question
    assert found.figures["change"].startswith("stage ")
    assert "The smallest change that was found to fit" in found.words
    assert "Most of the device's peak are optimizer" in found.words


@pytest.mark.slow
def test_a_plan_that_lacks_room_on_the_host_is_not_explained_by_the_device() -> None:
    offloaded = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}
    found = answers({"zero_optimization": offloaded}, machine(4, 4, host_bytes=1e6))[0]
    assert "on the host where" in found.words
    assert "device's peak" not in found.words
