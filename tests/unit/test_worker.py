"""A worker does the most urgent of what can be done, and ends with its process."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardwell.errors import ShardwellError
from shardwell.memory import Event
from shardwell.offload.worker import Worker
from tests.support.patience import HANG, soon


class DeviceEvent:
    """As much of a device's event as `Event` needs."""

    def __init__(self) -> None:
        self._set = threading.Event()

    def set(self) -> None:
        self._set.set()

    def query(self) -> bool:
        return self._set.is_set()

    def synchronize(self) -> None:
        self._set.wait(HANG)


def marked() -> tuple[Any, Event]:
    event: Any = DeviceEvent()
    return event, Event(event)


def test_the_most_urgent_first_and_of_equals_the_first() -> None:
    worker, done = Worker("test"), list[str]()
    gate, mark = marked()
    worker.submit(lambda: mark.synchronize())  # holds the thread until all are there
    tickets = [worker.submit(lambda n=n: done.append(n), urgency=int(n[0])) for n in ("2a", "1a", "2b", "0a", "1b")]
    gate.set()
    for ticket in tickets:
        ticket.wait()
    assert done == ["0a", "1a", "1b", "2a", "2b"]


class Asked:
    """An event that counts how often it and others are asked, and passes after so many times."""

    num = 0

    def __init__(self, passes_after: int) -> None:
        self._passes_after = passes_after

    @property
    def is_done(self) -> bool:
        Asked.num += 1
        return Asked.num > self._passes_after

    def synchronize(self) -> None:
        pass


def done_by_a_held_worker(tasks: list[tuple[int, Asked]]) -> list[int]:
    """The urgencies of tasks with events, in the order in which a worker did them: all were there when it began."""
    worker, done = Worker("test"), list[int]()
    gate, mark = marked()
    worker.submit(lambda: mark.synchronize())
    tickets = [worker.submit(partial(done.append, urgency), urgency=urgency, after=after) for urgency, after in tasks]
    Asked.num = 0
    gate.set()
    for ticket in tickets:
        ticket.wait()
    return done


def test_a_worker_of_many_tasks_asks_for_few_events() -> None:
    order = list(range(300))[::-1]
    assert done_by_a_held_worker([(urgency, Asked(0)) for urgency in order]) == sorted(order)
    assert Asked.num <= 2 * len(order)


def test_a_task_that_became_ready_while_others_were_asked_is_not_overtaken() -> None:
    """A less urgent task that was submitted later may wait for it in the same thread, for ever."""
    assert done_by_a_held_worker([(0, Asked(1)), (1, Asked(1))]) == [0, 1]
    assert done_by_a_held_worker([(0, Asked(3)), (1, Asked(2)), (2, Asked(2))]) == [0, 1, 2]


class InVain:
    """What a drive that has stopped answering is waited for with."""

    is_done = False

    def synchronize(self) -> None:
        pass


def test_work_that_waited_in_vain_says_so_itself() -> None:
    worker, done = Worker("test"), list[str]()

    def fails() -> None:
        raise OSError("the drive is gone")

    lost = worker.submit(fails, after=InVain())
    worker.submit(lambda: done.append("another")).wait()
    with pytest.raises(OSError, match="the drive is gone"):
        lost.wait()
    assert done == ["another"]


def test_work_is_let_in_by_work_that_was_let_in_but_not_for_ever() -> None:
    worker, done, deepest = Worker("test"), list[int](), 0
    gate, mark = marked()
    worker.submit(mark.synchronize)

    def work(number: int) -> None:
        nonlocal deepest
        deepest = max(deepest, len(inspect.stack(0)))
        if number:
            worker.submit(lambda: work(number - 1), urgency=number - 1)
            worker.let_in(number)
        done.append(number)

    worker.submit(lambda: work(400), urgency=400)
    gate.set()
    while len(done) <= 400:
        time.sleep(0.01)
    assert sorted(done) == list(range(401))
    assert deepest < 60


def test_what_cannot_be_done_yet_does_not_hold_up_the_rest() -> None:
    worker, done = Worker("test"), list[str]()
    late, mark = marked()
    urgent = worker.submit(lambda: done.append("urgent"), urgency=-1, after=mark)
    worker.submit(lambda: done.append("ready"), urgency=5).wait()
    assert done == ["ready"]
    late.set()
    urgent.wait()
    assert done == ["ready", "urgent"]


def test_long_work_lets_in_what_is_more_urgent() -> None:
    worker, done = Worker("test"), list[str]()
    gate, mark = marked()

    def long() -> None:
        done.append("begin")
        mark.synchronize()
        worker.let_in(5)
        done.append("end")

    first = worker.submit(long, urgency=5)
    while not done:
        time.sleep(0.01)
    tickets = [worker.submit(lambda n=n: done.append(n), urgency=int(n)) for n in ("6", "5", "3", "4")]
    gate.set()
    for ticket in (first, *tickets):
        ticket.wait()
    assert done == ["begin", "3", "4", "end", "5", "6"]


def test_a_gate_lets_work_in_one_by_one_and_what_is_urgent_by_then() -> None:
    gate = threading.Semaphore(0)
    worker, done = Worker("test", gate=gate), list[int]()
    tickets = {n: worker.submit(lambda n=n: done.append(n), urgency=n) for n in (3, 2)}
    time.sleep(0.05)
    assert not done
    gate.release()
    tickets[2].wait()
    tickets[1] = worker.submit(lambda: done.append(1), urgency=1)
    gate.release(2)
    tickets[3].wait()
    assert done == [2, 1, 3]


def test_an_error_is_heard_by_who_waits_and_the_next_is_done() -> None:
    worker = Worker("test")
    ticket = worker.submit(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    worker.submit(lambda: None).wait()
    with pytest.raises(ZeroDivisionError):
        ticket.wait()


@pytest.mark.slow
def test_a_process_ends_with_what_was_begun() -> None:
    script = """
import threading, time
from shardwell.offload.worker import Worker
worker, gate, begun = Worker("test"), threading.Semaphore(0), threading.Event()
shut = Worker("shut", gate=gate)
shut.submit(lambda: print("never"))
worker.submit(lambda: (begun.set(), time.sleep(0.3), print("done", flush=True)))
worker.submit(lambda: print("never"))
begun.wait()
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG, check=True)
    assert found.stdout == "done\n"


@pytest.mark.slow
def test_a_process_ends_whose_dropped_work_would_have_freed_what_other_work_waits_for(tmp_path: Path) -> None:
    script = """
import sys, threading, torch
from shardwell.memory import MemoryStats
from tests.support.disk_engines import settings
from shardwell.offload.disk import DiskTier
from shardwell.offload.swapped_tensors import SwappedTensors
from shardwell.offload.worker import Worker
tier = DiskTier([sys.argv[1]], settings())
swapped = SwappedTensors(tier, MemoryStats(), "unit")
swapped.register([torch.arange(2000.0)])
taken, worker, shut = threading.Event(), Worker("reader"), Worker("updates", gate=threading.Semaphore(0))
first, memory = tier.memory(swapped.num_bytes), tier.memory(swapped.num_bytes)
for transfer in swapped.swap_in_to(first):
    transfer.wait()
shut.submit(lambda: swapped.swap_out(changed=False))  # which is dropped
worker.submit(lambda: (taken.set(), swapped.swap_in_to(memory)))
taken.wait()
print("trained", flush=True)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=soon(60), check=True)
    assert found.stdout == "trained\n"


def test_who_waits_for_work_that_is_dropped_hears_so() -> None:
    gate = threading.Semaphore(0)
    worker = Worker("test", gate=gate)
    ticket = worker.submit(lambda: None)
    del worker
    with pytest.raises(ShardwellError, match="the engine is gone"):
        ticket.wait()


def test_nobody_waits_for_the_thread_of_a_worker_that_is_garbage() -> None:
    """What it does may need another one's end, which comes later in the same collection."""
    going_on, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        going_on.wait(HANG)

    worker = Worker("test")
    ticket = worker.submit(work)
    assert begun.wait(HANG)
    begin = time.monotonic()
    del worker
    gc.collect()
    assert time.monotonic() - begin < soon(10)
    going_on.set()
    ticket.wait()
