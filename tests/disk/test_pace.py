"""How far ahead drives are asked: by how long their pages take, and how long units are used."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardwell.offload import param_swap
from shardwell.offload.disk import DiskTier
from shardwell.offload.param_swap import ReadAheadDepth
from tests.support.disk_engines import BLOCK, EACH, Stuck, noise, settings


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(param_swap, "time", made)
    return made


def use(pace: ReadAheadDepth, clock: Clock, num_units: int, unit: float, page: float, waited: float = 0.0) -> int:
    """Units that are used for so long each, after a page that came in so long; returns the depth."""
    for _ in range(num_units):
        pace.enter()
        clock.now += waited
        pace.note(page, waited)
        clock.now += unit
    return pace.depth


def test_one_unit_ahead_before_anything_was_measured() -> None:
    assert ReadAheadDepth(4).depth == 1


@pytest.mark.parametrize(("page", "expected"), [(0.005, 1), (0.015, 2), (0.025, 3), (0.035, 4), (0.5, 4)])
def test_as_many_units_as_are_used_while_a_page_comes(clock: Clock, page: float, expected: int) -> None:
    assert use(ReadAheadDepth(4), clock, 10, 0.01, page) == expected


def test_what_units_wait_for_pages_is_no_time_of_use(clock: Clock) -> None:
    """Else a drive that everybody waits for would look as fast as the units."""
    assert use(ReadAheadDepth(4), clock, 10, 0.01, 0.04, waited=0.03) == 4


def test_it_follows_drives_and_units_that_change(clock: Clock) -> None:
    pace = ReadAheadDepth(8)
    assert use(pace, clock, 10, 0.01, 0.075) == 8
    assert use(pace, clock, 40, 0.01, 0.015) == 2
    assert use(pace, clock, 1, 0.01, 0.055) == 6  # one late page is enough
    assert use(pace, clock, 60, 0.05, 0.055) == 2


def test_a_pause_between_passes_is_no_time_of_a_unit(clock: Clock) -> None:
    pace = ReadAheadDepth(4)
    use(pace, clock, 10, 0.01, 0.035)
    pace.pause()
    clock.now += 1000
    assert use(pace, clock, 1, 0.01, 0.035) == 4


@EACH
def test_a_transfer_knows_how_long_it_took(engine: str, tmp_path: Path) -> None:
    with DiskTier([tmp_path], settings(engine)) as tier:
        extent, memory = tier.allocate(64 * BLOCK), noise(64 * BLOCK)
        begin = time.monotonic()
        transfer = tier.write(extent, 0, memory)
        transfer.wait()
        elapsed = time.monotonic() - begin
        time.sleep(0.05)
        assert 0 < transfer.seconds <= elapsed


def test_one_that_is_not_done_has_taken_no_time_yet(tmp_path: Path) -> None:
    with DiskTier([tmp_path], settings()) as tier:
        extent, queue, stuck = tier.allocate(BLOCK), tier._queue, Stuck()
        tier._queue = stuck  # type: ignore[assignment]
        transfer = tier.read(extent, 0, noise(BLOCK))
        assert transfer.seconds == 0
        stuck.is_done, tier._queue = True, queue
