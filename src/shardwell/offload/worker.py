"""A worker: a host thread that does one task after the other, while the threads that submitted the tasks go on.

The worker takes the most urgent of the tasks that are ready. A task that needs something of a device or a disk has an
event for it. If no task is ready, the thread waits for the event of the task that was submitted first, because devices
work in order. If that wait fails, because a disk has stopped answering, the task starts all the same, so that it raises
the error. A long task can let in tasks that are more urgent.
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
from shardwell.spans import waiting

_MOST_LET_IN = 8  # tasks that have begun and are not done, because each let in the next


class TaskHandle:
    """A handle to a task of a worker."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def has_passed(self) -> bool:
        """Whether the task has ended, successfully or not."""
        return self._done.is_set()

    @property
    def has_succeeded(self) -> bool:
        """Whether the task has ended without an error."""
        return self.has_passed and self._error is None

    def wait(self) -> None:
        """Block until the task is done, and raise what it raised."""
        if not self._done.is_set():
            with waiting("host update"):
                self._done.wait()
        if self._error is not None:
            raise self._error

    def run(self, work: Callable[[], None]) -> None:
        """Run the task, and keep its error for `wait`."""
        try:
            work()
        except BaseException as error:
            self.fail(error)
        finally:
            self._done.set()

    def fail(self, error: BaseException) -> None:
        """Mark the task as failed."""
        self._error = error
        self._done.set()


@dataclass(eq=False)
class _Task:
    number: int
    urgency: int  # lower values are done sooner
    work: Callable[[], None]
    after: Waitable
    ticket: TaskHandle


class _Agenda:
    """The tasks of a worker's thread."""

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
        """Drop the tasks that have not begun."""
        with self._changed:
            self._is_over = True
            dropped, self._tasks = self._tasks, []
            self._changed.notify()
        for task in dropped:
            task.ticket.fail(ShardwellError("the engine is gone, and with it what it had still to do"))

    def take(self) -> _Task | None:
        """Return the next task; wait for one to become ready. Return None after `end`."""
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
        """Return a ready task that is more urgent than that, if there is one."""
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
        """Return the most urgent task that is ready.

        Newer tasks are asked first: if one is ready, so is an older one whose event comes before its own.
        """
        possible = [task for task in reversed(self._tasks) if task.after.is_done]
        return min(possible, key=lambda task: (task.urgency, task.number), default=None)


class Worker:
    """A thread that starts with the first task, and ends after its current task with this object or the process."""

    def __init__(self, name: str, cores: Sequence[int] | None = None, gate: threading.Semaphore | None = None) -> None:
        """With `cores`, the thread and the threads that it starts stay on them.

        With a `gate`, the thread acquires it before it selects and runs each task.
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
        """Queue a task. Tasks of equal urgency are done in the order of submission. A ticket may exist already."""
        if self._thread is None:
            arguments = self._agenda, self._cores, self._gate
            self._thread = threading.Thread(target=_serve, args=arguments, name=self._name, daemon=True)
            _threads[self._thread] = self._agenda, self._gate
            self._thread.start()
            weakref.finalize(self, _end, self._agenda, self._gate).atexit = False
            atexit.unregister(_end_all)
            atexit.register(_end_all)  # so that it runs before the finalizers of what the tasks need
        task = _Task(next(self._numbers), urgency, work, after or Event(), ticket or TaskHandle())
        self._agenda.add(task)
        return task.ticket

    def let_in(self, urgency: int) -> None:
        """Run, inside a task, the ready tasks that are more urgent than that, unless too many are nested."""
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


_threads: dict[threading.Thread, tuple[_Agenda, threading.Semaphore | None]] = {}  # threads that have not ended


def _end(agenda: _Agenda, gate: threading.Semaphore | None) -> None:
    """End a thread without a wait: garbage is collected in any thread, and the task may need other threads to end."""
    agenda.end()
    if gate is not None:
        gate.release()


def _end_all() -> None:
    """End all threads: a thread that outlives the interpreter crashes the process."""
    threads = dict(_threads)
    for agenda, gate in threads.values():
        _end(agenda, gate)
    for thread in threads:
        thread.join()
