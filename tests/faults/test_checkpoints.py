"""Trouble on one rank while a checkpoint is saved or loaded reaches all of them, and what can go on goes on."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.checkpoint.save import Saver
from tests.support.faults import fault_at
from tests.support.internals import collectives_of, saver_of
from tests.support.models import Gpt, batches, share, zero
from tests.support.patience import HANG, soon
from tests.support.ranks import Ranks

SOON = 4.0  # seconds
LINGER = 5.0  # that rank 0 waits for others to hear what became of a save


class Moody(torch.optim.lr_scheduler.LambdaLR):
    """A schedule whose state cannot be had, or taken back, now and then."""

    fails = ""

    def state_dict(self) -> dict[str, Any]:
        if self.fails == "save":
            raise KeyError("no state today")
        return super().state_dict()


def started() -> shardwell.Engine:
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = Moody(optimizer, lambda step: 1.0)
    engine = shardwell.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=zero(3)).engine
    step(engine)
    return engine


def step(engine: shardwell.Engine) -> None:
    engine.backward(engine(share(batches(1, 4)[0], dist.get_rank(), dist.get_world_size())))
    engine.step()


def refuse(*_: Any, **__: Any) -> None:
    raise ValueError("not on this rank")


def saved_once_it_is_well(folder: str) -> tuple[str, str, bool]:
    """Rank 0 cannot tell what its schedule is: nothing is saved, and training and the next save go on."""
    engine = started()
    assert engine.lr_scheduler is not None
    engine.lr_scheduler.fails = "save" if dist.get_rank() == 0 else ""
    with pytest.raises(shardwell.CheckpointError) as caught:
        engine.save_checkpoint(folder, tag="first")
    engine.lr_scheduler.fails = ""
    step(engine)
    return str(caught.value), type(caught.value.__cause__).__name__, engine.save_checkpoint(folder, tag="second")


def test_values_that_cannot_be_had_on_one_rank_are_an_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, saved_once_it_is_well, str(tmp_path))
    assert first == ("KeyError: 'no state today'", "KeyError", True)
    assert second == ("rank 0: KeyError: 'no state today'", "NoneType", True)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["second"]


WHERE = {
    "save": "wait before a save",
    "write": "save",
    "load": "check of a checkpoint",
}


def fail_inside(folder: str, what: str) -> dict[str, Any]:
    """An error where nobody agrees on any: the others are told, and stop."""
    engine = started()
    engine.save_checkpoint(folder, tag="good")
    begin = time.monotonic()
    try:
        with fault_at(WHERE[what], refuse) if dist.get_rank() == 1 else contextlib.nullcontext():
            if what == "load":
                engine.load_checkpoint(folder)
            else:
                engine.save_checkpoint(folder, tag="bad")
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("what", WHERE)
def test_an_error_on_one_rank_is_told_to_the_others(ranks: Ranks, tmp_path: Path, what: str) -> None:
    other, culprit = ranks.run(2, fail_inside, str(tmp_path), what)
    assert (culprit["error"], culprit["text"]) == ("ValueError", "not on this rank")
    assert other["error"] == ("CheckpointError" if what == "write" else "PeerError")  # rank 0 tells what became of it
    call = "load_checkpoint" if what == "load" else "save_checkpoint"
    assert f"ValueError in {call}: not on this rank" in other["text"]
    assert other["seconds"] < soon(SOON + LINGER)


def told_late(folder: str) -> tuple[int, str, str]:
    """A save in the background fails on rank 1, and rank 0 hears of that some steps later."""
    engine, heard = started(), 0
    with fault_at("background save", refuse), pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(Saver, "_wait_for_readers", lambda *_: time.sleep(1.0))
        engine.save_checkpoint(folder, tag="first", asynchronous=True)
        has_heard, num_more = torch.zeros(1), 5
        while not has_heard or (num_more := num_more - 1):
            try:
                step(engine)
            except shardwell.CheckpointError:
                heard += 1
            time.sleep(0.02)
            has_heard.fill_(heard)
            dist.all_reduce(has_heard, dist.ReduceOp.MIN)
        engine.save_checkpoint(folder, tag="second", asynchronous=True)
        if dist.get_rank() == 1:
            saver_of(engine)._thread.join()
            with pytest.raises(shardwell.CheckpointError):
                step(engine)  # it knows already
        else:
            step(engine)
        with pytest.raises(shardwell.CheckpointError) as caught:
            engine.save_checkpoint(folder, tag="third")
    step(engine)
    engine.save_checkpoint(folder, tag="fourth")
    return heard, str(caught.value), type(caught.value).__name__


@pytest.mark.slow
def test_ranks_may_hear_of_a_failed_save_at_different_steps(ranks: Ranks, tmp_path: Path) -> None:
    one, other = ranks.run(2, told_late, str(tmp_path))
    words = "a checkpoint was not saved in the background: rank 0: not on this rank; rank 1: not on this rank"
    assert one == (1, words, "CheckpointError")
    assert other == (1, f"rank 0: {words}", "CheckpointError")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["fourth"]


def lost(folder: str, *, asynchronous: bool) -> tuple[str, float]:
    """Rank 1 is gone before it has written its part; nobody knows why."""
    engine, store = started(), dist.distributed_c10d._get_default_store()
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwell.engine.checkpoints.LIMIT_AFTER_FAILURE", 2.0)
        if dist.get_rank() == 1:
            patch.setattr(Saver, "_write", lambda *_: None)
            engine.save_checkpoint(folder, tag="one", asynchronous=asynchronous)
            collectives_of(engine).abort_links()
            store.wait(["rank 0 is done"], timedelta(seconds=HANG))
            return "", 0.0
        try:
            engine.save_checkpoint(folder, tag="one", asynchronous=asynchronous)
            with pytest.raises(shardwell.PeerError):
                step(engine)
            engine.finish_saving()
        except shardwell.CheckpointError as error:
            return str(error), time.monotonic() - begin
        finally:
            store.set("rank 0 is done", "")
    return "", 0.0


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_is_gone_is_not_waited_for(ranks: Ranks, tmp_path: Path, asynchronous: bool) -> None:
    words, seconds = ranks.run(2, lost, str(tmp_path), asynchronous=asynchronous)[0]
    assert ("no word from rank 1 for 2 s" if asynchronous else "a peer stopped answering") in words
    assert seconds < soon(25)  # not minutes


def diverge() -> tuple[str, str]:
    """Rank 1 looks at a parameter as it is, while rank 0 needs it for a forward, in codes."""
    torch.manual_seed(0)
    model = Gpt()
    config = zero(3, zero_optimization={"zero_quantized_weights": True}, shardwell={"divergence_timeout": 1.5})
    engine = shardwell.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config).engine
    step(engine)
    try:
        if dist.get_rank() == 1:
            with shardwell.zero.GatheredParameters(list(model.parameters())):
                pass
        step(engine)
    except shardwell.ShardwellError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_an_exact_gather_is_not_taken_for_one_of_codes(ranks: Ranks) -> None:
    for error, text in ranks.run(2, diverge):
        assert error == "DivergenceError"
        assert "exactly" in text
