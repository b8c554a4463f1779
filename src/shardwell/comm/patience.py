"""Waiting for gloo in a way that can be given up.

Gloo forgets a message that is on its way when its link breaks: whoever waits for it waits until the group's timeout,
half an hour by default, and nothing wakes him. So a thread waits, and the caller looks now and then whether a peer has
failed. If one has, or if a signal comes, the caller raises, and the thread stays behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_LOOK_EVERY = 0.5  # seconds

_idle: list[_Waiter] = []


def wait_for(works: list[Any], look: Callable[[], None]) -> None:
    """Return when all works are done; raises what one of them raises, or `look`, which is called while they are not."""
    try:
        waiter = _idle.pop()
    except IndexError:
        waiter = _Waiter()
    waiter.begin(works)
    while not waiter.done.acquire(timeout=_LOOK_EVERY):
        look()
    error, waiter.error = waiter.error, None
    _idle.append(waiter)
    if error is not None:
        raise error


class _Waiter:
    """A thread that waits for one caller at a time."""

    def __init__(self) -> None:
        self.done = threading.Lock()  # held until they are
        self.done.acquire()
        self.error: Exception | None = None
        self._tasks: SimpleQueue[list[Any]] = SimpleQueue()
        threading.Thread(target=self._serve, name="shardwell waits", daemon=True).start()

    def begin(self, works: list[Any]) -> None:
        self._tasks.put(works)

    def _serve(self) -> None:
        while True:
            self._wait(self._tasks.get())  # holds no work, and so no memory, once it is done
            self.done.release()

    def _wait(self, works: list[Any]) -> None:
        try:
            for work in works:
                work.wait()
        except Exception as error:
            self.error = error
