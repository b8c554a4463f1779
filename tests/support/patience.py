"""How long a test may wait, on a machine that other tests keep busy.

Two kinds of limits. `HANG` only ends what would never end: it is long, since a test that passes does not wait for it.
`soon` is part of a claim, such as "the others hear of it soon and not after half an hour": it is short on an idle
machine and grows with the number of processes that want a core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

HANG = 600.0  # seconds; the limit of a test in pyproject.toml is longer
MOST = 12.0  # times as long as on an idle machine


def how_busy() -> float:
    """Return how many threads want each core, now or on the average of a minute; at least 1, at most `MOST`."""
    words = Path("/proc/loadavg").read_text().split()
    wanted = max(float(words[0]), float(words[3].partition("/")[0]))
    return min(MOST, max(1.0, wanted / len(os.sched_getaffinity(0))))


def soon(seconds: float) -> float:
    """Return how many seconds something may take that may take `seconds` on an idle machine."""
    return seconds * how_busy()


def becomes(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait until the condition holds; return whether it did soon enough."""
    begin = time.monotonic()
    while not (found := condition()) and time.monotonic() - begin < soon(seconds):
        time.sleep(0.01)
    return found
