"""Bounds on what waits."""

from __future__ import annotations

import threading

import pytest

from shardwell.offload.staging import ByteThrottle

LONG = 10.0  # seconds; nothing here takes that long


def added(backlog: ByteThrottle, num_bytes: int) -> threading.Event:
    """An event that is set when the backlog has let that in."""
    done = threading.Event()

    def add() -> None:
        backlog.add(num_bytes)
        done.set()

    threading.Thread(target=add, daemon=True).start()
    return done


def test_a_full_backlog_lets_in_when_enough_has_left() -> None:
    backlog = ByteThrottle(100)
    backlog.add(60)
    backlog.add(40)
    waiting = added(backlog, 50)
    backlog.remove(40)
    assert not waiting.wait(0.05)
    backlog.remove(60)
    assert waiting.wait(LONG)


@pytest.mark.parametrize("size", [101, 1000])
def test_what_is_larger_than_the_bound_goes_alone(size: int) -> None:
    backlog = ByteThrottle(100)
    backlog.add(size)
    waiting = added(backlog, 1)
    assert not waiting.wait(0.05)
    backlog.remove(size)
    assert waiting.wait(LONG)
