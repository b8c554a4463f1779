"""Pausing after updates that did not stand, and slots that come back."""

from __future__ import annotations

import threading
import time

from shardwell.memory import Device, Event, MemoryStats
from shardwell.offload.speculation import SpeculationBackoff
from shardwell.offload.staging import PinnedAllocator, StagingPool
from tests.support.patience import HANG


def tries(caution: SpeculationBackoff, outcomes: list[bool]) -> list[bool]:
    """Whether it speculated in each of some steps; an outcome says whether an update of that step would stand."""
    found = []
    for stands in outcomes:
        found.append(caution.may_speculate)
        if found[-1] and not stands:
            caution.note_failure()
        caution.end_step()
    return found


def test_it_speculates_while_updates_stand() -> None:
    assert tries(SpeculationBackoff(), [True] * 20) == [True] * 20


def test_pauses_double_while_steps_clip() -> None:
    found = tries(SpeculationBackoff(), [False] * 200)
    tried = [step for step, one in enumerate(found) if one]
    assert tried == [0, 2, 5, 10, 19, 36, 69, 134, 199]


def test_a_pause_ends_and_trust_returns() -> None:
    caution = SpeculationBackoff()
    tries(caution, [False] * 40)
    found = tries(caution, [True] * 80)
    assert found[40:] == [True] * 40
    assert tries(caution, [False, True, True]) == [True, False, True]  # pauses are short again


def test_who_finds_no_slot_waits_for_one() -> None:
    memory_stats = MemoryStats()
    slots = StagingPool(PinnedAllocator(Device("cpu"), memory_stats), 2, 64)
    first, second = slots.take(64), slots.take(10)
    assert first.data_ptr() != second.data_ptr()
    taken: list[int] = []
    waiter = threading.Thread(target=lambda: taken.append(slots.take(64).data_ptr()))
    waiter.start()
    time.sleep(0.05)
    assert not taken
    slots.give(first, Event())
    waiter.join(HANG)
    assert taken == [first.data_ptr()]
    assert memory_stats.report().total() == 128


def test_a_slot_that_is_too_small_is_replaced() -> None:
    memory_stats = MemoryStats()
    slots = StagingPool(PinnedAllocator(Device("cpu"), memory_stats), 1, 64)
    slots.give(slots.take(64), Event())
    assert slots.take(100).numel() == 100
    assert memory_stats.report().total() == 100
