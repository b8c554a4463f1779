"""Saves that cannot go as they should: no thread, no memory, a rank that is killed. And nothing stays behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from shardwell.checkpoint import Folder, directory
from shardwell.checkpoint import save as saving
from shardwell.checkpoint.export import to_safetensors
from shardwell.errors import CheckpointError
from tests.support.checkpoint_engines import CASE, alone, step
from tests.support.checkpoint_folders import hidden
from tests.support.checkpoint_legs import Leg
from tests.support.checkpoint_samples import Counting
from tests.support.faults import fault_at
from tests.support.models import batches, share
from tests.support.patience import HANG, soon
from tests.support.ranks import Ranks


def test_a_save_in_the_background_without_a_free_thread_is_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = alone()
    step(engine)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.warns(UserWarning, match="written synchronously"):
            engine.save_checkpoint(tmp_path, asynchronous=True)
    engine.finish_saving()
    assert Folder(tmp_path).tags() == ["global_step1"]
    assert hidden(tmp_path) == []
    alone().load_checkpoint(tmp_path)


def test_a_save_in_the_background_without_memory_for_the_copy_leaves_nothing(tmp_path: Path) -> None:
    engine = alone()

    def refuse(*_: Any) -> None:
        raise RuntimeError("not enough memory: you tried to allocate 8 bytes")

    with fault_at("copy of a background save", refuse):
        engine.save_checkpoint(tmp_path, asynchronous=True)
        with pytest.raises(CheckpointError, match="no copy to be written: not enough memory"):
            engine.finish_saving()
    assert hidden(tmp_path) == []
    engine.save_checkpoint(tmp_path, asynchronous=True)
    engine.finish_saving()


def test_a_save_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    engine = alone()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with fault_at("file of a checkpoint", interrupt), pytest.raises(KeyboardInterrupt):
        engine.save_checkpoint(tmp_path)
    assert os.listdir(tmp_path) == []


def keys_after_saves(root: str) -> list[int]:
    """How many keys the store has after each save."""
    engine = Leg(1, 0, 1, CASE, loads=False).engine()
    rows = share(batches(1, 8)[0], dist.get_rank(), dist.get_world_size())
    store, counts = dist.distributed_c10d._get_default_store(), []
    for _ in range(8):
        engine.backward(engine(rows))
        engine.step()
        engine.save_checkpoint(root)
        counts.append(store.num_keys())
        dist.barrier()
    return counts


def test_the_store_does_not_grow_with_saves(ranks: Ranks, tmp_path: Path) -> None:
    counts = ranks.run(2, keys_after_saves, str(tmp_path))[0]
    assert counts[-1] <= counts[3] + 8, counts  # barriers of this test count theirs


def other_tag(root: str) -> str:
    engine = Leg(1, 0, 1, CASE, loads=False).engine()
    try:
        engine.save_checkpoint(root, f"tag-{dist.get_rank()}")
    except CheckpointError as error:
        engine.save_checkpoint(root, "tag")
        return str(error)
    return ""


def test_ranks_with_different_tags_hear_so_and_go_on(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(2, other_tag, str(tmp_path)):
        assert "save_checkpoint: tag: rank 0 has 'tag-0', and rank 1 has 'tag-1'" in said
    assert Folder(tmp_path).tags() == ["tag"]


# --- killed -----------------------------------------------------------------------------------------------------


def be_killed_or_survive(rank: int, port: int, root: str) -> None:
    """Rank 1 is killed while it writes in the background; rank 0 notes what it hears, and when."""
    os.environ.update(SHARDWELL_DEVICE="cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=TCPStore("127.0.0.1", port), rank=rank, world_size=2)
    engine = Leg(1, 0, 1, CASE, loads=False).engine()
    if rank == 1:
        saving.stream = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    engine.save_checkpoint(root, asynchronous=True)
    begin = time.monotonic()
    try:
        engine.finish_saving()
        words = "nothing"
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    Path(root, "heard").write_text(json.dumps([time.monotonic() - begin, words]))


@pytest.mark.slow
def test_who_waits_for_a_save_in_which_a_rank_was_killed_hears_so_soon(
    tmp_path: Path, preloaded_processes: None
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=be_killed_or_survive, args=(r, store.port, str(tmp_path))) for r in range(2)]
    for job in jobs:
        job.start()
    try:
        jobs[1].join(HANG)
        killed = time.monotonic()
        jobs[0].join(HANG)
        assert jobs[0].exitcode is not None, "still there"
        assert time.monotonic() - killed < soon(45)  # it ends, too
    finally:
        for job in jobs:
            job.kill()
            job.join()
    seconds, words = json.loads((tmp_path / "heard").read_text())
    assert words.startswith("PeerError: "), words
    assert seconds < soon(15), seconds


# --- exports ----------------------------------------------------------------------------------------------------


def test_what_killed_exports_left_goes_with_the_next_one(tmp_path: Path) -> None:
    killed, running, other = (tmp_path / f".{name}.{'0' * 16}.partial" for name in ("killed", "running", "other"))
    for path in (killed, running, other):
        path.mkdir()
        (path / "model.safetensors").write_text("half")
    directory.close(directory.lock(killed))
    lock = directory.lock(running)
    to_safetensors(Counting({"model/w": torch.ones(3)}), tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == sorted([running.name, other.name, "out"])
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    directory.close(lock)
