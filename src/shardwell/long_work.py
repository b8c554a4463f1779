"""Says how far work has come if it takes long: nothing for some seconds, then a line now and then on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

BEFORE_THE_FIRST = 10.0  # seconds
BETWEEN_LINES = 10.0


class LongWork:
    """Work of a known size, or of an unknown one (0), such as the bytes of a checkpoint or the units of a model.

    Only a rank that `speaks` prints. Threads may add at the same time: what one overwrites is a little of a count.
    """

    def __init__(self, words: str, total: int = 0, *, speaks: bool, shown: Callable[[float], str] = "{:,.0f}".format):
        self._words, self._total, self._speaks, self._shown = words, total, speaks, shown
        self._done, self._began = 0, time.monotonic()
        self._next = self._began + BEFORE_THE_FIRST

    def add(self, amount: int = 1) -> None:
        """Note that so much more is done, and print if that is due."""
        self._done += amount
        if self._speaks and (now := time.monotonic()) >= self._next:
            self._next = now + BETWEEN_LINES
            print(self._line(now - self._began), file=sys.stderr, flush=True)

    def _line(self, seconds: float) -> str:
        done = min(self._done, self._total or self._done)
        if not self._total:
            return f"{self._words}: {self._shown(done)} in {seconds:.0f} s"
        left = seconds * (self._total - done) / max(done, 1)
        share = f"{self._shown(done)} of {self._shown(self._total)} ({done / self._total:.0%})"
        return f"{self._words}: {share} in {seconds:.0f} s, about {left:.0f} s left"


class LongWait:
    """A wait for something else than work of one's own, whose end nobody knows."""

    def __init__(self, words: str) -> None:
        self._words, self._began = words, time.monotonic()
        self._next = self._began + BEFORE_THE_FIRST

    def look(self) -> None:
        """Say what is waited for, if that is due."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + 3 * BETWEEN_LINES
            print(f"{self._words} ({now - self._began:.0f} s so far)", file=sys.stderr, flush=True)
