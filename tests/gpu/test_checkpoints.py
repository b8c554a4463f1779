"""On CUDA: checkpoints, also in the background, and between a GPU and the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwell.checkpoint import Folder
from tests.support.checkpoint_legs import Leg, everything, run_leg, uninterrupted
from tests.support.gpu import nccl_engine
from tests.support.ranks import Ranks
from tests.support.training import Case

pytestmark = pytest.mark.gpu

PRECISIONS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "loss_scale": 8.0}}}
CASE = Case(dtype=torch.float32, groups=True, options={"lr": 1e-2, "weight_decay": 0.1, "fused": True})


def on_the_gpu(leg: Leg, root: str) -> dict[str, Any]:
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    try:
        return run_leg(leg, root)
    finally:
        os.environ["SHARDWELL_DEVICE"] = "cpu"


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_on_the_gpu_goes_on_with_the_same_bits(ranks: Ranks, tmp_path: Path, stage: int, precision: str) -> None:
    first = Leg(stage, 0, 3, CASE, PRECISIONS[precision], loads=False, options={"asynchronous": True})
    whole = ranks.run(2, on_the_gpu, uninterrupted(first, 6), str(tmp_path))
    before = ranks.run(2, on_the_gpu, first, str(tmp_path))
    after = ranks.run(2, on_the_gpu, Leg(stage, 3, 6, CASE, PRECISIONS[precision]), str(tmp_path))
    for rank in range(2):
        check_equal(after[rank]["loaded"], before[rank]["ended"])
        check_equal(after[rank]["ended"], whole[rank]["ended"])


def test_from_the_gpu_to_the_cpu_and_back(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(2, on_the_gpu, Leg(3, 0, 2, CASE, PRECISIONS["bf16"], loads=False), str(tmp_path))[0]
    plain = Case(dtype=torch.float32, groups=True)
    here = ranks.run(3, run_leg, Leg(1, 2, 3, plain), str(tmp_path))[0]
    check_equal(here["loaded"], saved["ended"])
    back = ranks.run(1, on_the_gpu, Leg(2, 3, 3, CASE, PRECISIONS["fp16"], saves=False), str(tmp_path))[0]
    check_equal(back["loaded"], here["ended"])


def save_while_training(stage: int, bf16: bool, root: str) -> dict[str, Any]:
    """A snapshot is taken in stream order: what is queued after it must not reach it."""
    engine, data = nccl_engine(stage, bf16={"enabled": bf16})
    for batch in data[:3]:
        engine.backward(engine(batch))
        engine.step()
    torch.cuda.synchronize()
    expected = everything(engine)
    torch.cuda._sleep(200_000_000)  # the copy waits behind this, and training is queued behind the copy
    engine.save_checkpoint(root, asynchronous=True)
    for batch in data[3:]:
        engine.backward(engine(batch))
        engine.step()
    engine.finish_saving()
    assert Folder(root).tags() == ["global_step3"]
    engine.load_checkpoint(root)
    return {"expected": expected, "found": everything(engine)}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_snapshot_is_of_its_moment(ranks: Ranks, tmp_path: Path, stage: int, bf16: bool) -> None:
    answer = ranks.run(1, save_while_training, stage, bf16, str(tmp_path))[0]
    check_equal(answer["found"], answer["expected"])
