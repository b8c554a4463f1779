"""Waiting for gloo in a way that can be given up.

Gloo forgets a message that is on its way when its link breaks: whoever waits for it waits until the group's timeout,
half an hour by default, and nothing wakes him. So a thread waits, and the caller looks now and then whether a peer has
failed. If one has, the caller raises, and the thread stays behind. So it is if a signal raises something, but what is
on its way gets a while to end first: then nothing is lost, and whoever catches that can go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_LOOK_EVERY = 0.5  # seconds
_GRACE = 5.0  # seconds for what is on its way when a signal comes

_idle: list[_WaitThread] = []


def wait_all(works: list[Any], look: Callable[[], None], abandon: Callable[[BaseException], None]) -> None:
    """Return when all works are done; raises what one of them raises, or `look`, which is called while they are not.

    `abandon` is called with what a signal has raised, if works are left behind that still use their memory.
    """
    try:
        waiter = _idle.pop()
    except IndexError:
        waiter = _WaitThread()
    waiter.begin(works)
    is_over = False
    try:
        while not (is_over := waiter.done.acquire(timeout=_LOOK_EVERY)):
            look()
    except RuntimeError:  # of `look`, which knows that there is nothing to wait for
        raise
    except BaseException as signal:
        try:
            is_over = is_over or waiter.done.acquire(timeout=_GRACE)
        finally:
            if is_over:
                waiter.free()
            else:
                abandon(signal)
        raise
    if (error := waiter.free()) is not None:
        raise error


class _WaitThread:
    """A thread that waits for one caller at a time."""

    def __init__(self) -> None:
        self.done = threading.Lock()  # held until they are
        self.done.acquire()
        self.error: Exception | None = None
        self._tasks: SimpleQueue[list[Any]] = SimpleQueue()
        threading.Thread(target=self._serve, name="shardwell waits", daemon=True).start()

    def begin(self, works: list[Any]) -> None:
        self._tasks.put(works)

    def free(self) -> Exception | None:
        """It is done, and ready for others; returns what was raised."""
        error, self.error = self.error, None
        _idle.append(self)
        return error

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
