"""Where a thread is can be looked up without touching what it holds."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref

import pytest

from shardwell.parallel.thread_location import main_thread_state, thread_location
from tests.support.patience import HANG


class Held:
    """What a function has in a local variable."""


def looked_up_by_another_thread() -> str:
    said: list[str] = []
    state = main_thread_state()
    looker = threading.Thread(target=lambda: (time.sleep(0.1), said.append(thread_location(state))))
    looker.start()
    looker.join()
    return said[0]


def test_the_line_of_the_users_code_is_named() -> None:
    said = looked_up_by_another_thread()
    line = looked_up_by_another_thread.__code__.co_firstlineno + 5
    assert said.startswith("in user code at ")
    assert f"test_whereabouts.py:{line} (" in said


def test_a_thread_that_may_end_is_not_looked_at() -> None:
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(main_thread_state()))
    thread.start()
    thread.join()
    assert found == [None]
    assert thread_location(None) == "busy"


RACE = """
import ctypes, threading, time
from shardwell.parallel.thread_location import main_thread_state, thread_location
library, state, is_over = ctypes.CDLL(None), main_thread_state(), threading.Event()
library.pthread_create.argtypes = [ctypes.c_void_p] * 4
library.pthread_join.argtypes = [ctypes.c_ulong, ctypes.c_void_p]
nothing = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
function = ctypes.cast(nothing, ctypes.c_void_p)
looks = 0

def look():
    global looks
    while not is_over.is_set():
        assert "<string>" in thread_location(state)
        looks += 1

looker = threading.Thread(target=look)
looker.start()
threads, end = (ctypes.c_ulong * 16)(), time.monotonic() + 1.0
while time.monotonic() < end or looks < 200:  # as autograd's: C++ starts them, and they enter Python by themselves
    for number in range(16):
        library.pthread_create(ctypes.addressof(threads) + 8 * number, None, function, None)
    for thread in threads:
        library.pthread_join(thread, None)
is_over.set()
looker.join()
print("looks", looks)
"""


@pytest.mark.slow
def test_threads_that_start_meanwhile_do_no_harm() -> None:
    run = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=HANG)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[1]) > 100


def test_nothing_that_a_thread_drops_is_freed_by_the_one_that_looks() -> None:
    freed_by: set[str] = set()
    is_over = threading.Event()
    state = main_thread_state()

    def look() -> None:
        while not is_over.is_set():
            thread_location(state)

    def hold(depth: int) -> None:
        held = Held()
        weakref.finalize(held, lambda: freed_by.add(threading.current_thread().name))
        if depth:
            hold(depth - 1)

    looker = threading.Thread(target=look, name="looker")
    looker.start()
    end = time.monotonic() + 0.5
    while time.monotonic() < end or not freed_by:
        hold(5)
    is_over.set()
    looker.join()
    assert freed_by == {threading.current_thread().name}
