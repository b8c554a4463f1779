"""A slow rank is waited for and named; one that went on is a divergence; of one that is gone the others hear soon."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.engine import exit_notice
from shardwell.parallel import heartbeat, peer_failures
from tests.support.command import environment
from tests.support.models import Gpt, batches, share, zero
from tests.support.patience import HANG, soon
from tests.support.ranks import Ranks

SHORT = 1.0  # seconds: the limit of divergences
SLOW = 6.0  # ranks look at others after 1, 2 and 4 s
SOON = 15.0


def one_is_slow(when: str, folder: str) -> dict[str, Any]:
    """Rank 0 alone is busy before the first step, or before a save."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwell").addHandler(handler)
    torch.manual_seed(0)
    model = Gpt()
    config = zero(2, shardwell={"divergence_timeout": SHORT})
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    try:
        for step, batch in enumerate(batches(2, 4)):
            if dist.get_rank() == 0 and when == "the first step" and step == 0:
                time.sleep(SLOW)
            engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
            engine.step()
        if dist.get_rank() == 0 and when == "a save":
            time.sleep(SLOW)
        engine.save_checkpoint(folder)
    finally:
        logging.getLogger("shardwell").removeHandler(handler)
    return {"heard": [words for words in heard if "waiting for" in words], "steps": engine.global_steps}


@pytest.mark.parametrize("when", ["the first step", "a save"])
def test_a_rank_that_is_slow_before_something_is_waited_for_and_named(ranks: Ranks, tmp_path: Path, when: str) -> None:
    answers = ranks.run(2, one_is_slow, when, str(tmp_path))
    assert [answer["steps"] for answer in answers] == [2, 2]
    assert any("rank 0, which is in user code at tests/faults/test_slow_ranks.py:" in w for w in answers[1]["heard"])


class Words(dict[str, bytes]):
    """A store."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_a_rank_whose_process_is_stopped_is_said_to_be_so() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        own = heartbeat.RankProcess.own()
        process = heartbeat.RankProcess(own.space, child.pid, heartbeat._state_of(child.pid)[1])
        said = {"moves": 3, "doing": "busy", "seconds": 0.0, "elsewhere": None, "process": process.words}
        beats = heartbeat.Heartbeats.__new__(heartbeat.Heartbeats)
        beats._store, beats._seen_of = Words({"pulse/1": json.dumps(said).encode()}), {}
        sign = beats.of(1)
        assert sign is not None
        assert not sign.is_stalled
        child.send_signal(signal.SIGSTOP)
        while not process.is_stopped:
            time.sleep(0.01)
        sign = beats.of(1)
        assert sign is not None
        assert sign.is_stalled
        assert str(sign).startswith("stopped, by SIGSTOP or a debugger (it was busy)")
    finally:
        child.kill()
        child.wait()


def test_a_rank_that_sends_no_heartbeats_is_not_said_to_be_busy_only() -> None:
    assert str(heartbeat.Heartbeat(3, "busy", 1.0, silence=2.0)) == "busy for 3 s"
    assert heartbeat.Heartbeat(3, "busy", 1.0, silence=70.0).is_stalled
    assert str(heartbeat.Heartbeat(3, "busy", 1.0, silence=70.0)) == "busy for 71 s, and sent no heartbeat for 70 s"


def one_leaves_by_sys_exit(where: str) -> str:
    """Rank 1 leaves in a hook of the model; its process ends then, and so does its engine here."""
    torch.manual_seed(0)
    model = Gpt()
    config = zero(3, shardwell={"divergence_timeout": SHORT})
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    if dist.get_rank() == 1:
        block = next(module for module in model.modules() if isinstance(module, torch.nn.LayerNorm))
        hooked = block.register_forward_hook if where == "forward" else block.register_full_backward_hook
        hooked(lambda *_: sys.exit(3))
    try:
        engine.backward(engine(share(batches(1, 4)[0], dist.get_rank(), dist.get_world_size())))
        engine.step()
    except SystemExit:
        exit_notice._tell_all()
    except shardwell.PeerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_leaves_by_sys_exit_inside_of_the_engine_has_not_finished(ranks: Ranks, where: str) -> None:
    words, _ = ranks.run(2, one_leaves_by_sys_exit, where)
    assert f"rank 1 left by sys.exit(3) in {where}" in words
    assert "number of batches" not in words


def one_saves_alone(folder: str) -> dict[str, Any]:
    """Rank 0 saves, the others train on: that will never come together."""
    torch.manual_seed(0)
    model = Gpt()
    config = zero(3, shardwell={"divergence_timeout": 30.0})
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    batch = batches(1, 4)[0]
    begin = time.monotonic()
    try:
        for _ in range(2):
            engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
            engine.step()
        begin = time.monotonic()
        if dist.get_rank() == 0:
            engine.save_checkpoint(folder)
        else:
            engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
    except shardwell.ShardwellError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}
    return {"error": "", "text": "", "seconds": 0.0}


def test_a_rank_that_went_on_to_something_else_is_a_divergence_long_before_the_limit(
    ranks: Ranks, tmp_path: Path
) -> None:
    for answer in ranks.run(2, one_saves_alone, str(tmp_path)):
        assert answer["error"] == "DivergenceError"
        assert "save_checkpoint" in answer["text"]
        assert "rank 1 did not join it but went on without it" in answer["text"]
        assert answer["seconds"] < soon(SOON)


def cross(limit: float) -> dict[str, Any]:
    """Two engines, in another order on each rank."""
    torch.manual_seed(0)
    engines = []
    for _ in range(2):
        model = Gpt()
        config = zero(3, shardwell={"divergence_timeout": limit})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engines.append(shardwell.initialize(model=model, optimizer=optimizer, config=config).engine)
    batch = batches(1, 4)[0]
    try:
        for turn in range(2):
            for engine in engines if turn == 0 or dist.get_rank() == 0 else engines[::-1]:
                engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
                engine.step()
    except shardwell.ShardwellError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": "", "text": ""}


def test_engines_in_another_order_on_each_rank_are_a_divergence(ranks: Ranks) -> None:
    answers = ranks.run(2, cross, 2.0)
    assert "DivergenceError" in {answer["error"] for answer in answers}
    assert {answer["error"] for answer in answers} <= {"DivergenceError", "PeerError"}


kept: list[shardwell.Engine] = []


def leave_engines() -> None:
    """Engines outlive the process group that they were made in."""
    for _ in range(2):
        model = Gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(3)).engine
        for _ in range(4):
            engine.backward(engine(batches(1, 2)[0]))
            engine.step()
        kept.append(engine)


def test_engines_of_an_earlier_process_group_do_not_hide_that(ranks: Ranks) -> None:
    ranks.run(2, leave_engines)
    answers = ranks.run(2, cross, 2.0)
    assert "DivergenceError" in {answer["error"] for answer in answers}


class Pulse:
    """Heartbeats that find one more process ended each time."""

    def __init__(self, *found: list[int]) -> None:
        self._found = list(found)

    def lost(self) -> list[int]:
        return self._found.pop(0) if len(self._found) > 1 else self._found[0]


@pytest.mark.parametrize(
    "found", [([], [], [0]), ([2], [2, 0])], ids=["its connections close first", "a peer followed"]
)
def test_the_rank_that_held_the_store_is_the_one_that_is_gone(found: tuple[list[int], ...]) -> None:
    failures = peer_failures.PeerFailures(1, (0, 1, 2), lambda: None)
    failures._pulse = Pulse(*found)  # type: ignore[assignment]
    assert "rank 0 is gone" in str(failures.without_store(RuntimeError("Connection reset by peer")))


@pytest.mark.slow
def test_survivors_of_a_kill_end_soon_and_name_the_rank_that_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.killed_script", str(tmp_path)]
    done = subprocess.run(
        command, env=environment(root=True), capture_output=True, text=True, timeout=HANG, check=False
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == 4, done.stderr[-2000:]
    for answer in answers:
        assert answer["error"] == "PeerError", answer
        assert f"rank {answer['victim']} is gone" in answer["text"]
        assert answer["seconds"] < soon(SOON)


def test_a_process_is_not_taken_for_a_later_one_with_its_number() -> None:
    own = heartbeat.RankProcess.own()
    assert not own.has_ended
    assert heartbeat.RankProcess(own.space, own.pid, own.started + 1).has_ended
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    process = heartbeat.RankProcess(own.space, child.pid, heartbeat._state_of(child.pid)[1])
    while child.poll() is None:
        time.sleep(0.01)
    assert process.has_ended
