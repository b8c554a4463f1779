"""Thin trials of rows that are not offered yet: they show that the table carries them without forks in the engine.

The configuration refuses these keys; the trials lift the refusal on their own ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.comm import Kind
from shardwell.config import unsupported
from shardwell.memory import Tier
from tests.checkpoint.legs import Leg, run_leg, uninterrupted
from tests.models import Gpt, batches, share, whole_parameters, zero
from tests.parity.loops import Case, all_sharded, distance, plainly
from tests.ranks import Ranks

KEYS = ("shardwell.commit", "zero_optimization.zero_hpz_partition_size", "zero_optimization.offload_optimizer.device")


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


# ------------------------------------------------------------- optimizer state on the host, three ways to commit


def host_case(commit: str, **kwargs: Any) -> Case:
    config = {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
        "shardwell": {"shard_at_world_one": True, "commit": commit},
        "bf16": {"enabled": True},
    }
    return Case(steps=8, dtype=torch.float32, config=config, **kwargs)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_on_the_host_gives_the_bits_of_state_on_the_device(ranks: Ranks, stage: int) -> None:
    device = Case(steps=8, dtype=torch.float32, config={"bf16": {"enabled": True}})
    there, here = ranks.run(2, on_trial, [device, host_case("after_norm")], stage)[0]
    for name in there:
        assert (there[name] == here[name]).all(), name


@pytest.mark.parametrize("clip", [0.0, 0.3, 1.2], ids=["never clipped", "always clipped", "sometimes clipped"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_commit_policies_give_the_same_bits(ranks: Ranks, stage: int, clip: float) -> None:
    policies = ["after_norm", "shadow"] + (["at_once"] if clip == 0.0 else [])
    cases = [host_case(policy, clip=clip, accumulation=2) for policy in policies]
    first, *others = ranks.run(2, on_trial, cases, stage)[0]
    for other in others:
        for name in first:
            assert (first[name] == other[name]).all(), name


def shadow_after_nan() -> bool:
    for key in KEYS:
        unsupported.ONLY.pop(key, None)
    torch.manual_seed(0)
    model = Gpt()
    config = zero(2, shardwell={"commit": "shadow", "nonfinite": "skip"})
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine, *_ = shardwell.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config
    )
    rows = share(batches(1, 4)[0], dist.get_rank(), dist.get_world_size())
    engine.backward(engine(rows))
    engine.step()
    before = whole_parameters(model)
    engine.backward(engine(rows) * float("nan"))
    engine.step()
    after = whole_parameters(model)
    held = {tier for _, _, tier in engine.memory().now}
    return engine.skipped_steps == 1 and Tier.HOST in held and all(torch.equal(before[n], after[n]) for n in before)


def test_a_shadow_is_taken_back_when_the_gradients_are_not_finite(ranks: Ranks) -> None:
    assert ranks.run(2, shadow_after_nan) == [True, True]


# ---------------------------------------------------------------------------------- checkpoints between the tiers


def leg_on_trial(leg: Leg, root: str) -> dict[str, Any]:
    for key in KEYS:
        unsupported.ONLY.pop(key, None)
    return run_leg(leg, root)


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_go_from_the_device_to_the_host_and_back(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    case, bf16 = Case(dtype=torch.float32), {"bf16": {"enabled": True}}
    host = {**bf16, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    first = Leg(stage, 0, 2, case, bf16, loads=False)
    whole = ranks.run(2, leg_on_trial, uninterrupted(first, 6), str(tmp_path))[0]["ended"]
    ranks.run(2, leg_on_trial, first, str(tmp_path))
    ranks.run(2, leg_on_trial, Leg(stage, 2, 4, case, host), str(tmp_path))
    found = ranks.run(2, leg_on_trial, Leg(stage, 4, 6, case, bf16), str(tmp_path))[0]["ended"]
    for name, value in whole.items():
        assert np.array_equal(found[name], value), name
