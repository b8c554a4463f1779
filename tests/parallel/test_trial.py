"""ZeRO++ by "auto": tried on these links before it is chosen, alike on all ranks."""

from __future__ import annotations

import itertools
import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.config import load
from shardwell.engine import autotune
from shardwell.engine.autotune import COPIES, GRADIENTS, WEIGHTS, Timing
from shardwell.parallel import RankGroup, TrafficKind
from shardwell.sharding import GroupPrecision
from shardwell.sharding.model_states import GroupKey as Group
from tests.support.models import Gpt, zero
from tests.support.ranks import Ranks
from tests.support.zeropp_auto import AUTO, ON, trained, trained_if

OFF = {WEIGHTS: False, GRADIENTS: False, COPIES: 1}


def trained_by_dice(seed: int) -> dict[str, Any]:
    """With a clock that shows something else on every rank."""
    dice = random.Random(f"{seed} {dist.get_rank()}")
    ticks = itertools.accumulate(dice.uniform(0, 0.02) for _ in itertools.count())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotune, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
        return trained(AUTO)


@pytest.mark.parametrize(("with_it", "is_on"), [(0.5, True), (0.89, True), (0.9, False), (1.0, False), (2.0, False)])
def test_what_is_hardly_faster_stays_off(with_it: float, is_on: bool) -> None:
    times = Timing(1.0, with_it)
    assert times.are_worth_it is is_on
    said = f"a gather takes {1e3 * with_it:.2f} ms encoded, 1000.00 ms as it is"
    assert times.told("gather", "encoded", "as it is") == said


@pytest.mark.parametrize(("free", "why"), [(2000, None), (1999, "copies of 1000 B, and room for 1000 B")])
def test_second_copies_may_take_half_of_what_a_gpu_has_free(free: int, why: str | None) -> None:
    """Four ranks in nodes of two: 1000 elements in bf16 are 1000 bytes for each. Small parameters stay whole."""
    precision = GroupPrecision.of(torch.float32, torch.bfloat16, trainable=True)
    kinds = {Group(precision, True, persistent=False): 1000, Group(precision, True, persistent=True): 50}
    shard = SimpleNamespace(rank_group=RankGroup(0, 4, 2, "nccl"), all_reduce_min=lambda value, _: value)
    gpu = SimpleNamespace(has_device_memory=True, available_bytes=lambda: float(free))
    context = SimpleNamespace(device=gpu, roles=SimpleNamespace(shard=shard))
    tried: Any = (load({}), context, SimpleNamespace(units={"unit": kinds}))
    assert autotune.Autotuner(*tried)._too_large(2) == why


@pytest.mark.parametrize("bf16", [False, True])
def test_the_choice_is_the_same_on_all_ranks_and_moves_what_it_would_if_it_were_asked_for(
    ranks: Ranks, bf16: bool
) -> None:
    found = ranks.run(4, trained, AUTO, bf16={"enabled": bf16})
    asked = ranks.run(4, trained, found[0]["chosen"], bf16={"enabled": bf16})
    for one, other in zip(found, asked, strict=True):
        assert one["chosen"] == found[0]["chosen"]
        assert (one["step"], one["loss"]) == (other["step"], other["loss"])
        assert one["origins"] == found[0]["origins"]
        assert all(text.startswith("auto -> ") and " ms " in text for text in one["origins"])
        assert other["origins"] == ["dict"] * 3


def check_the_trial(found: list[dict[str, Any]], asked: list[dict[str, Any]]) -> None:
    """It is told and booked, and leaves nothing behind."""
    for rank, (one, other) in enumerate(zip(found, asked, strict=True)):
        pairs = zip((WEIGHTS, GRADIENTS, COPIES), one["origins"], strict=True)
        said = [words for words in one["said"] if not words.startswith("shardwell:")]  # that is of the start
        assert said == (["; ".join(f"{key}: {text}" for key, text in pairs)] if rank == 0 else [])
        assert one["set_up"][TrafficKind.SETUP] > other["set_up"][TrafficKind.SETUP]
        assert one["set_up"][TrafficKind.ALL_GATHER] == one["set_up"][TrafficKind.REDUCE_SCATTER] == 0
        assert (one["staging"], one["same_randomness"]) == (0, True)


@pytest.mark.parametrize(("worth_it", "chosen"), [(float("inf"), ON), (0.0, OFF)])
def test_what_is_chosen_is_in_force_and_a_trial_leaves_nothing(
    ranks: Ranks, worth_it: float, chosen: dict[str, Any]
) -> None:
    found = ranks.run(4, trained_if, worth_it, AUTO)
    asked = ranks.run(4, trained, chosen)
    for one, other in zip(found, asked, strict=True):
        assert one["chosen"] == chosen
        assert (one["step"], one["loss"]) == (other["step"], other["loss"])
    if chosen == OFF:
        check_the_trial(found, asked)


@pytest.mark.slow
def test_ranks_with_different_times_decide_alike(ranks: Ranks) -> None:
    for seed in range(2):
        chosen = [one["chosen"] for one in ranks.run(4, trained_by_dice, seed)]
        assert chosen == [chosen[0]] * 4


def test_a_second_copy_is_compared_with_the_gather_that_was_chosen(ranks: Ranks) -> None:
    for one in ranks.run(4, trained, {WEIGHTS: True, COPIES: "auto"}):
        assert one["chosen"][WEIGHTS] is True
        assert one["chosen"][COPIES] in (1, 2)
        assert one["origins"][:2] == ["dict", "default"]


@pytest.mark.parametrize(
    ("num_ranks", "stage", "ranks_per_node", "why"),
    [
        (1, 3, 1, ["one rank"] * 3),
        (2, 1, 2, ["stage 1"] * 3),
        (2, 2, 2, ["stage 2", "ms", "stage 2"]),
        (2, 3, 2, ["ms", "ms", "no nodes of several ranks, all alike"]),
        (2, 3, 1, ["ms", "ms", "no nodes of several ranks, all alike"]),
    ],
)
def test_what_has_no_meaning_is_off_and_not_measured(
    ranks: Ranks, num_ranks: int, stage: int, ranks_per_node: int, why: list[str]
) -> None:
    found = ranks.run(num_ranks, trained_if, 0.0, AUTO, stage, ranks_per_node)
    asked = ranks.run(num_ranks, trained, {}, stage, ranks_per_node)
    measured = "ms" in why
    for one, other in zip(found, asked, strict=True):
        assert one["chosen"] == OFF
        assert all(reason in text for reason, text in zip(why, one["origins"], strict=True)), one["origins"]
        assert (one["set_up"] == other["set_up"]) is not measured
        assert (one["step"], one["loss"]) == (other["step"], other["loss"])


def simulated() -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    os.environ.update(LOCAL_WORLD_SIZE="8")
    with torch.device("meta"):
        model = Gpt()
    engine, *_ = shardwell.initialize(model=model, config=zero(3, zero_optimization=AUTO))
    return {key: engine.config.origins[f"zero_optimization.{key}"] for key in AUTO}


def test_simulated_ranks_measure_nothing(ranks: Ranks) -> None:
    (found,) = ranks.run(1, simulated)
    off = "auto -> false (simulated ranks)"
    assert found == {WEIGHTS: off, GRADIENTS: off, COPIES: "auto -> 1 (simulated ranks)"}


def test_what_no_codec_takes_is_not_encoded(ranks: Ranks) -> None:
    for one in ranks.run(4, trained_in_fp64):
        assert one == [False, False, 2]


def trained_in_fp64() -> list[Any]:
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(dist.get_rank() % 2))
    model = Gpt().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotune, "WORTH_IT", float("inf"))
        engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=zero(3, zero_optimization=AUTO))
    return [getattr(engine.config.zero_optimization, key) for key in AUTO]
