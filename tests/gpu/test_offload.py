"""On CUDA: optimizer state in host memory, updated there while the device goes on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwell.utils import safe_get_full_fp32_param
from tests.support.checkpoint_legs import Leg, run_leg
from tests.support.gpu import nccl_engine, on_the_gpu
from tests.support.offload_cases import HOST, PRECISIONS, blocks, disk_case, host_case, waiting_on
from tests.support.ranks import Ranks
from tests.support.training import Case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("clip", [0.0, 0.01, 1.2], ids=["never clipped", "always", "sometimes"])
def test_commit_policies_give_the_same_bits_on_the_gpu(ranks: Ranks, stage: int, clip: float, num_ranks: int) -> None:
    policies = ["after_norm", "shadow"] + (["at_once"] if clip == 0.0 else [])
    cases = [host_case(policy, clip=clip, groups=True, steps=5) for policy in policies]
    first, *others = ranks.run(num_ranks, on_the_gpu, cases, stage)[0]
    for other in others:
        for name in first:
            assert (first[name] == other[name]).all(), name


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_few_slots_give_the_same_bits(ranks: Ranks, num_slots: int) -> None:
    """Units wait for a slot on the device, for the porter, and for each other."""
    cases = []
    for policy in ("after_norm", "at_once"):
        case = host_case(policy, groups=True, steps=5, model={"blocks": 8})
        block = {"offload_optimizer": {"device": "cpu", "ratio": 1.0, "buffer_count": num_slots}}
        cases.append(replace(case, config={**case.config, "zero_optimization": block}))
    first, other = ranks.run(1, on_the_gpu, cases, 2)[0]
    for name in first:
        assert (first[name] == other[name]).all(), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_where_parameters_rest_makes_no_difference_on_the_gpu(ranks: Ranks, precision: str) -> None:
    case = host_case("auto", precision, steps=4, clip=0.5, accumulation=2)
    blocks = [{**HOST, "offload_param": {"device": device}} for device in ("none", "cpu")]
    cases = [replace(case, config={**case.config, "zero_optimization": block}) for block in blocks]
    first, other = ranks.run(2, on_the_gpu, cases, 3)[0]
    for name in first:
        assert (first[name] == other[name]).all(), name


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("clip", [0.0, 1.2], ids=["never clipped", "sometimes"])
def test_state_on_disk_gives_the_bits_of_state_on_the_host(
    ranks: Ranks, tmp_path: Path, stage: int, clip: float
) -> None:
    case = host_case("auto", clip=clip, groups=True, steps=4)
    below, deeper = ranks.run(2, on_the_gpu, [case, disk_case(case, tmp_path)], stage)[0]
    for name, value in below.items():
        assert (deeper[name] == value).all(), name


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_that_wait_on_disk_give_the_bits_of_those_on_the_host(
    ranks: Ranks, tmp_path: Path, stage: int, accumulation: int
) -> None:
    case = disk_case(host_case("auto", clip=1.2, accumulation=accumulation, groups=True, steps=4), tmp_path)
    above, below = ranks.run(2, on_the_gpu, [waiting_on("host", case), waiting_on("disk", case)], stage)[0]
    for name, value in above.items():
        assert (below[name] == value).all(), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_placement_below_gives_the_same_bits_on_the_gpu(
    ranks: Ranks, tmp_path: Path, num_ranks: int, precision: str
) -> None:
    case = host_case("auto", precision, steps=4, clip=0.5, accumulation=2, groups=True)
    places = [("none", "cpu"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "cpu"), ("nvme", "nvme"), ("none", "nvme")]
    own = {"shard_at_world_one": True}
    cases = [
        replace(
            case,
            config={**case.config, "zero_optimization": blocks(*place, tmp_path), "shardwell": own},
        )
        for place in places
    ]
    first, *others = ranks.run(num_ranks, on_the_gpu, cases, 3)[0]
    for place, other in zip(places[1:], others, strict=True):
        for name, value in first.items():
            assert (other[name] == value).all(), (place, name)


def first_step(stage: int, offload: bool, precision: str, clip: float) -> dict[str, Any]:
    block = HOST if offload else {}
    engine, data = nccl_engine(stage, zero_optimization=block, gradient_clipping=clip, **PRECISIONS[precision])
    for batch in data[:1]:
        engine.backward(engine(batch))
        engine.step()
    return {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])  # fp32 gradients are not the same bits in two runs on a GPU
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_a_step_is_within_ulps_of_a_step_on_the_device(ranks: Ranks, stage: int, precision: str, clip: float) -> None:
    here, there = (ranks.run(1, first_step, stage, offload, precision, clip)[0] for offload in (False, True))
    for name, one in here.items():
        other, size = there[name], np.maximum(np.abs(one), np.float32(1e-2))  # lr: no update is larger
        assert (np.abs(one - other) <= np.spacing(size)).all(), name


def host_leg(leg: Leg, root: str) -> dict[str, Any]:
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    try:
        return run_leg(leg, root)
    finally:
        os.environ["SHARDWELL_DEVICE"] = "cpu"


def test_checkpoints_between_the_tiers_on_the_gpu(ranks: Ranks, tmp_path: Path) -> None:
    case, host = Case(dtype=torch.float32), {**PRECISIONS["bf16"], "zero_optimization": HOST}
    saved = ranks.run(2, host_leg, Leg(3, 0, 2, case, PRECISIONS["bf16"], loads=False), str(tmp_path))[0]["ended"]
    middle = ranks.run(1, host_leg, Leg(2, 2, 4, case, host, options={"asynchronous": True}), str(tmp_path))[0]
    last = ranks.run(2, run_leg, Leg(1, 4, 4, case, saves=False), str(tmp_path))[0]
    for found, expected in ((middle["loaded"], saved), (last["loaded"], middle["ended"])):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert np.array_equal(found[name], value), name
