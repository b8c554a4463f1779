"""Waiting for gloo in a way that can be abandoned.

Gloo forgets a message in flight when its link breaks: a thread that waits for it waits until the group's timeout, half
an hour by default, and nothing wakes it. So a helper thread waits, and the caller checks periodically whether a peer
has failed. If one has, the caller raises, and the helper thread is left behind. The same happens if a signal raises an
exception, but then works in flight get some time to complete first: if they do, nothing is lost, and a caller that
catches the exception can go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_LOOK_EVERY = 0.5  # seconds
_GRACE = 5.0  # seconds for works in flight when a signal comes

_idle: list[_WaitThread] = []


def wait_all(works: list[Any], look: Callable[[], None], abandon: Callable[[BaseException], None]) -> None:
    """Return when all works are done; raise what one of them raises, or what `look` raises.

    `look` is called periodically while they are not done. `abandon` is called with what a signal has raised, if works
    are left behind that still use their memory.
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
    except RuntimeError:  # from `look`, which knows that waiting is useless
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
    """A thread that waits on behalf of one caller at a time."""

    def __init__(self) -> None:
        self.done = threading.Lock()  # held until the works are done
        self.done.acquire()
        self.error: Exception | None = None
        self._tasks: SimpleQueue[list[Any]] = SimpleQueue()
        threading.Thread(target=self._serve, name="shardwell waits", daemon=True).start()

    def begin(self, works: list[Any]) -> None:
        """Start to wait for these works."""
        self._tasks.put(works)

    def free(self) -> Exception | None:
        """Make the thread, which is done, available to other callers; return what a work raised."""
        error, self.error = self.error, None
        _idle.append(self)
        return error

    def _serve(self) -> None:
        while True:
            self._wait(self._tasks.get())  # keeps no reference to the works, and so no memory, once they are done
            self.done.release()

    def _wait(self, works: list[Any]) -> None:
        try:
            for work in works:
                work.wait()
        except Exception as error:
            self.error = error
