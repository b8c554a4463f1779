"""On CUDA: units on three tiers, and shards that are born below the GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwell
from shardwell.memory import Tier
from tests.support.models import zero
from tests.support.offload_cases import on_disk
from tests.support.placements import BELOW, BORN, CLIPPED, Stack, auto, born, trained
from tests.support.ranks import Ranks

pytestmark = pytest.mark.gpu


def on_the_gpu(function: Any, *args: Any, **kwargs: Any) -> Any:
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    return function(*args, **kwargs)


@pytest.mark.parametrize("parameters", ["none", "cpu"])
@pytest.mark.parametrize("others", [{}, CLIPPED], ids=["at once", "after the norm"])
def test_units_on_three_tiers_give_the_bits_of_units_on_the_host(
    ranks: Ranks, tmp_path: Path, parameters: str, others: dict[str, Any]
) -> None:
    own = auto(30, 100 if others else 80)
    block = {**on_disk(tmp_path, buffer_count=3), "offload_param": {"device": parameters}}
    below = ranks.run(2, on_the_gpu, trained, BELOW, {}, **others)[0]
    for found in ranks.run(2, on_the_gpu, trained, block, own, **others):
        assert {optimizer for _, optimizer in found["rows"]} == set(Tier)
        for name, value in below["values"].items():
            assert np.array_equal(found["values"][name], value), name


def test_what_is_free_on_the_gpu_is_filled(ranks: Ranks) -> None:
    block = {**BELOW, "offload_param": {"device": "cpu"}}
    found = ranks.run(1, on_the_gpu, trained, block, {"placement": "auto"})[0]
    assert found["rows"] == [(Tier.DEVICE, Tier.DEVICE)] * 8  # it is a small model


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_where_everything_fits_updates_are_those_without_offloading(ranks: Ranks, stage: int) -> None:
    block = {"offload_optimizer": {"device": "cpu", "ratio": "auto"}}
    own = {"commit": "auto", "shard_at_world_one": True}
    plain = ranks.run(1, on_the_gpu, trained, {}, own, stage)[0]
    found = ranks.run(1, on_the_gpu, trained, block, own, stage)[0]
    assert found["rows"] == [(Tier.DEVICE, Tier.DEVICE)] * 8
    assert found["executor"] == plain["executor"] == "InlineExecutor"
    for name, value in plain["values"].items():
        assert np.array_equal(found["values"][name], value), name


def on_the_gpu_at_peak(path: str, remote: str) -> tuple[int, int]:
    """Bytes on the GPU while a model is born, and where its shards are then."""
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    config = zero(3, zero_optimization={"offload_param": {"device": "cpu", "nvme_path": path}})
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with shardwell.zero.Init(config=config, remote_device=remote):
        model = Stack(layers=64)
    assert all(parameter.is_cuda for parameter in model.parameters())
    return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("remote", list(BORN))
def test_shards_leave_the_gpu_as_they_are_born(ranks: Ranks, tmp_path: Path, remote: str) -> None:
    peak, after = ranks.run(1, on_the_gpu_at_peak, str(tmp_path), remote)[0]
    layer = 64 * 64 * 4
    assert layer < peak <= 8 * layer  # of 64
    assert after <= layer
    usual = ranks.run(2, on_the_gpu, born, str(tmp_path), "none")
    for found, expected in zip(ranks.run(2, on_the_gpu, born, str(tmp_path), remote), usual, strict=True):
        assert {tier for tier, _ in found["at rest"]} == {BORN[remote]}
        for name, value in expected["stepped"].items():
            assert np.array_equal(found["stepped"][name], value), name
