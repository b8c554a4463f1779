"""Where work that the host does, or waits for, is reported while a timeline is recorded; otherwise nobody listens.

Code that reports asks `listener` first, so that nothing but that question is done when no timeline is recorded.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Protocol

PROFILE_FOLDER = "SHARDWELL_PROFILE"  # the folder that `shardwell run --profile` names to its ranks


class SpanListener(Protocol):
    """An object that is told of spans, on any thread; times are those of `time.perf_counter`."""

    def span(self, row: str, name: str, begin: float, end: float, num_bytes: int = 0) -> None:
        """Take a span that has ended."""

    def transfer(self, is_write: bool, num_bytes: int, transfer: object) -> None:
        """Take a transfer from or to disk that was just started; it has `seconds` when it has ended."""


listener: SpanListener | None = None


@contextlib.contextmanager
def waiting(cause: str) -> Iterator[None]:
    """Report a wait of the main thread, which is that of the training loop; other threads may wait as they like."""
    begin, heard = time.perf_counter(), listener
    yield
    if heard is not None and threading.current_thread() is threading.main_thread():
        heard.span("wait", cause, begin, time.perf_counter())
