"""Checkpoints that are written in the background while training goes on."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from shardwell.checkpoint import Folder
from shardwell.checkpoint import save as saving
from shardwell.errors import CheckpointError
from tests.support.checkpoint_engines import CASE, alone, step
from tests.support.checkpoint_legs import Leg, everything, run_leg
from tests.support.faults import fault_at
from tests.support.internals import saver_of
from tests.support.models import batches, share
from tests.support.ranks import Ranks


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_a_save_in_the_background_holds_the_state_of_its_moment(
    ranks: Ranks, tmp_path: Path, precision: dict[str, Any]
) -> None:
    first = Leg(2, 0, 2, CASE, precision, loads=False, options={"tag": "now"})
    ranks.run(2, run_leg, first, str(tmp_path))
    ranks.run(2, save_and_go_on, first, str(tmp_path))
    now = ranks.run(2, load_tag, first, str(tmp_path), "now")[0]
    later = ranks.run(2, load_tag, first, str(tmp_path), "later")[0]
    assert now.keys() == later.keys()
    for name, value in now.items():
        assert np.array_equal(value, later[name]), name


def save_and_go_on(leg: Leg, root: str) -> None:
    engine = leg.engine()
    hold, write = threading.Event(), saving.stream
    data = [share(batch, dist.get_rank(), dist.get_world_size()) for batch in batches(6, 48)]
    for number, batch in enumerate(data):
        engine.backward(engine(batch))
        engine.step()
        if number == 1:
            saving.stream = lambda *args: (hold.wait(), write(*args))[1]  # nothing is written before training goes on
            engine.save_checkpoint(root, "later", asynchronous=True)
    assert not Folder(root).is_committed("later")
    hold.set()
    engine.finish_saving()
    saving.stream = write
    assert Folder(root).is_committed("later")


def load_tag(leg: Leg, root: str, tag: str) -> dict[str, Any]:
    engine = leg.engine()
    engine.load_checkpoint(root, tag)
    return everything(engine)


def errors_in_the_background(root: str) -> list[str]:
    engine = Leg(1, 0, 1, CASE, loads=False).engine()
    rows = share(batches(1, 48)[0], dist.get_rank(), dist.get_world_size())
    found = []

    def failing(write: Any, path: Path, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise CheckpointError(f"{path}: cannot be written (No space left on device)")
        return write(path, *args)

    with fault_at("file of a checkpoint", failing):
        engine.save_checkpoint(root, "bad", asynchronous=True)
        while saver_of(engine)._thread.is_alive():
            time.sleep(0.01)
    engine.backward(engine(rows))
    try:
        engine.step()
    except CheckpointError as error:
        found.append(str(error))  # and the step has been taken
    engine.save_checkpoint(root, "good", asynchronous=True)
    engine.save_checkpoint(root, "better")  # waits for the one before
    assert Folder(root).tags() == ["better", "good"]
    found.append(f"{engine.global_steps} step, {sorted(p.name for p in Path(root).iterdir())}")
    return found


def test_errors_in_the_background_come_up_at_the_next_step_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for error, rest in ranks.run(2, errors_in_the_background, str(tmp_path)):
        assert "rank 1: " in error
        assert "rank-00001.safetensors: cannot be written (No space left on device)" in error
        assert rest == "1 step, ['better', 'good', 'latest']"


def test_the_memory_of_a_snapshot_is_used_again_and_in_the_books(tmp_path: Path) -> None:
    engine = alone()
    step(engine)
    before = engine.memory().total()
    engine.save_checkpoint(tmp_path, "one", asynchronous=True)
    snapshot = saver_of(engine)._snapshot
    engine.finish_saving()
    address, size = snapshot._memory.data_ptr(), snapshot._memory.numel()
    assert engine.memory().total() == before + size
    numel = sum(p.numel() for p in engine.module.parameters())
    assert 12 * numel <= size <= 12 * numel + 64 * 200 + 20_000  # fp32 master and moments; padding; random states
    step(engine)
    engine.save_checkpoint(tmp_path, "two", asynchronous=True)
    engine.finish_saving()
    assert snapshot._memory.data_ptr() == address


def test_engines_that_saved_are_collected(tmp_path: Path) -> None:
    engine = alone()
    engine.save_checkpoint(tmp_path, asynchronous=True)
    engine.finish_saving()
    reference = weakref.ref(engine)
    engine.destroy()
    del engine
    gc.collect()
    assert reference() is None
