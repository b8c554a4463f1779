"""A lane on the host: a thread that does one thing after the other, while those who gave it work go on.

It does what is most urgent of what can be done already. Work that needs something of a device or a drive has a mark
for it; if nothing can be done yet, the thread waits for what was given first, because devices do things in order. If
that wait was in vain, because a drive has stopped answering, the work begins all the same: it knows what to say. Long
work can let in what is more urgent.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwell.errors import ShardwellError
from shardwell.memory.device import Event, Waitable
from shardwell.offload.cores import stay_on

_MOST_LET_IN = 8  # pieces of work that are begun and not done, because each let in the next


class TaskHandle:
    """Work that a worker was given."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def has_passed(self) -> bool:
        return self._done.is_set()

    @property
    def has_succeeded(self) -> bool:
        return self.has_passed and self._error is None

    def wait(self) -> None:
        """Block until it is done; raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.fail(error)
        finally:
            self._done.set()

    def fail(self, error: BaseException) -> None:
        """It cannot be done."""
        self._error = error
        self._done.set()


@dataclass(eq=False)
class _Task:
    number: int
    urgency: int  # the lower, the sooner
    work: Callable[[], None]
    after: Waitable
    ticket: TaskHandle


class _Agenda:
    """What the thread has to do."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: list[_Task] = []
        self._is_over = False

    def add(self, task: _Task) -> None:
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()
        if self._is_over:
            self.end()

    def end(self) -> None:
        """What has not begun is not done any more."""
        with self._changed:
            self._is_over = True
            dropped, self._tasks = self._tasks, []
            self._changed.notify()
        for task in dropped:
            task.ticket.fail(ShardwellError("the engine is gone, and with it what it had still to do"))

    def take(self) -> _Task | None:
        """What is to be done now; None when it is over."""
        while True:
            with self._changed:
                while not self._tasks:
                    if self._is_over:
                        return None
                    self._changed.wait()
                task = self._best()
                if task is not None:
                    self._tasks.remove(task)
                    return task
                first = self._tasks[0]
            first.after.synchronize()
            if not first.after.is_done and self._remove(first):
                return first

    def take_before(self, urgency: int) -> _Task | None:
        """What is more urgent than that and can be done, if there is anything."""
        with self._changed:
            task = self._best()
            if task is None or task.urgency >= urgency:
                return None
            self._tasks.remove(task)
            return task

    def _remove(self, task: _Task) -> bool:
        with self._changed:
            if task not in self._tasks:
                return False
            self._tasks.remove(task)
            return True

    def _best(self) -> _Task | None:
        """Newer ones are asked first: if one can be done, so can an older one whose mark comes before its own."""
        possible = [task for task in reversed(self._tasks) if task.after.is_done]
        return min(possible, key=lambda task: (task.urgency, task.number), default=None)


class Worker:
    """The thread starts with the first piece of work, and ends with this object or the process, after what it does."""

    def __init__(self, name: str, cores: Sequence[int] | None = None, gate: threading.Semaphore | None = None) -> None:
        """With `cores`, the thread and those that it starts stay on them. With a `gate`, each piece of work is chosen
        and done when that lets it.
        """
        self._name, self._cores, self._gate = name, cores, gate
        self._agenda = _Agenda()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._num_let_in = 0

    def submit(
        self,
        work: Callable[[], None],
        *,
        urgency: int = 0,
        after: Waitable | None = None,
        ticket: TaskHandle | None = None,
    ) -> TaskHandle:
        """Have something done. Of equal urgency, what was given first is done first. A ticket may exist already."""
        if self._thread is None:
            arguments = self._agenda, self._cores, self._gate
            self._thread = threading.Thread(target=_serve, args=arguments, name=self._name, daemon=True)
            _threads[self._thread] = self._agenda, self._gate
            self._thread.start()
            weakref.finalize(self, _end, self._agenda, self._gate).atexit = False
            atexit.unregister(_end_all)
            atexit.register(_end_all)  # so that it comes before the finalizers of what the work needs
        task = _Task(next(self._numbers), urgency, work, after or Event(), ticket or TaskHandle())
        self._agenda.add(task)
        return task.ticket

    def let_in(self, urgency: int) -> None:
        """Called by work: do now what is more urgent than that, unless too much was let in by others in turn."""
        if self._num_let_in == _MOST_LET_IN:
            return
        self._num_let_in += 1
        try:
            while (task := self._agenda.take_before(urgency)) is not None:
                task.ticket.run(task.work)
        finally:
            self._num_let_in -= 1


def _serve(agenda: _Agenda, cores: Sequence[int] | None, gate: threading.Semaphore | None) -> None:
    if cores is not None:
        stay_on(cores)
    while True:
        if gate is not None:
            gate.acquire()
        task = agenda.take()
        if task is None:
            _threads.pop(threading.current_thread(), None)
            return
        task.ticket.run(task.work)
        del task  # what it holds must not outlive it here


_threads: dict[threading.Thread, tuple[_Agenda, threading.Semaphore | None]] = {}  # that have not ended


def _end(agenda: _Agenda, gate: threading.Semaphore | None) -> None:
    """Nobody waits for the thread: garbage is collected in any thread, and what it does may need others to end."""
    agenda.end()
    if gate is not None:
        gate.release()


def _end_all() -> None:
    """A thread that outlives the interpreter takes the process down with it."""
    threads = dict(_threads)
    for agenda, gate in threads.values():
        _end(agenda, gate)
    for thread in threads:
        thread.join()
