"""Shards that go up to the GPU ahead of their gathers, on a lane of their own, and checkpoints that do not go there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.execution_orders import ORDERS, PLACES, in_any_order, ring
from tests.support.models import whole_parameters
from tests.support.offload_cases import blocks, check_equal
from tests.support.ranks import Ranks

pytestmark = pytest.mark.gpu

WIDE = 1536  # so that copies take a while


def on_the_gpu(*args: Any, **kwargs: Any) -> Any:
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    return in_any_order(*args, **kwargs)


@pytest.mark.parametrize("commit", ["at_once", "after_norm"])
@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_what_was_lifted_is_what_rests(ranks: Ranks, tmp_path: Path, place: tuple[str, str], commit: str) -> None:
    block = blocks(*place, tmp_path)
    commit = "after_norm" if place[1] == "none" else commit
    expected, none = ranks.run(2, on_the_gpu, block, commit, lifts=False, width=WIDE)[0]
    found, some = ranks.run(2, on_the_gpu, block, commit, lifts=True, width=WIDE)[0]
    check_equal(found, expected)
    assert none == 0
    assert some > len(ORDERS)


def saved_and_loaded(path: str, root: str) -> tuple[int, int, bool]:
    """How many bytes of the GPU a save and a load take, and whether the latter brought back what the former kept."""
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    own = {"shard_at_world_one": True}
    engine, _ = ring(blocks("nvme", "nvme", path), ORDERS[:2], WIDE, shardwell=own)
    before = whole_parameters(engine.module)
    torch.cuda.synchronize()
    saving = _taken(lambda: engine.save_checkpoint(root))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDE, device="cuda").bfloat16(), ORDERS[0]).float().mean())
        engine.step()
    torch.cuda.synchronize()
    loading = _taken(lambda: engine.load_checkpoint(root))
    after = whole_parameters(engine.module)
    return saving, loading, all(torch.equal(after[name], value) for name, value in before.items())


def _taken(action: Any) -> int:
    begin = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - begin


def test_checkpoints_of_what_rests_on_disk_leave_the_gpu_alone(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    saving, loading, is_same = ranks.run(1, saved_and_loaded, str(tmp_path / "drive"), str(tmp_path / "saved"))[0]
    assert is_same
    assert max(saving, loading) < WIDE * WIDE  # less than half of one block in bf16
