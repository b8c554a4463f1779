"""Where a thread is can be looked up without touching what it holds."""

from __future__ import annotations

import threading
import time
import weakref

from shardwell.parallel.thread_location import thread_location


class Held:
    """What a function has in a local variable."""


def test_the_line_of_the_users_code_is_named() -> None:
    arrived, go = threading.Event(), threading.Event()

    def wait() -> None:
        arrived.set()
        go.wait(10)

    thread = threading.Thread(target=wait)
    thread.start()
    arrived.wait(10)
    time.sleep(0.05)
    assert thread.ident is not None
    said = thread_location(thread.ident)
    go.set()
    thread.join()
    line = wait.__code__.co_firstlineno + 2
    assert said.startswith("in user code at ")
    assert f"test_whereabouts.py:{line} (" in said
    assert thread_location(thread.ident) == "in code that is nobody's"


def test_nothing_that_a_thread_drops_is_freed_by_the_one_that_looks() -> None:
    freed_by: set[str] = set()
    is_over = threading.Event()
    ident = threading.get_ident()

    def look() -> None:
        while not is_over.is_set():
            thread_location(ident)

    def hold(depth: int) -> None:
        held = Held()
        weakref.finalize(held, lambda: freed_by.add(threading.current_thread().name))
        if depth:
            hold(depth - 1)

    looker = threading.Thread(target=look, name="looker")
    looker.start()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        hold(5)
    is_over.set()
    looker.join()
    assert freed_by == {threading.current_thread().name}
