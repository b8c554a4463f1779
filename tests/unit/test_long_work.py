"""Lines about work that takes long: none at first, then where it is and how long it will go on."""

from __future__ import annotations

import pytest

from shardwell import long_work
from shardwell.long_work import LongWait, LongWork
from shardwell.memory.statistics import human


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(long_work.time, "monotonic", lambda: now[0])
    return now


def test_short_work_says_nothing_and_long_work_where_it_is(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    work = LongWork("saving a", 4 << 30, speaks=True, shown=human)
    clock[0] += 9
    work.add(1 << 30)
    assert capsys.readouterr().err == ""
    clock[0] += 2
    work.add(0)
    work.add(1 << 30)  # at once: no second line
    assert capsys.readouterr().err == "saving a: 1.0 GiB of 4.0 GiB (25%) in 11 s, about 33 s left\n"


def test_work_of_unknown_size_is_counted(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    work = LongWork("documents tokenised", speaks=True)
    clock[0] += 20
    work.add(12_000)
    assert capsys.readouterr().err == "documents tokenised: 12,000 in 20 s\n"


def test_one_rank_speaks(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    work = LongWork("a", 1, speaks=False)
    clock[0] += 20
    work.add()
    assert capsys.readouterr().err == ""


def test_a_long_wait_says_what_it_waits_for(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    wait = LongWait("waiting for a node")
    for seconds in (9, 2, 5, 30):
        clock[0] += seconds
        wait.look()
    assert capsys.readouterr().err == "waiting for a node (11 s so far)\nwaiting for a node (46 s so far)\n"
