"""A worker: a host thread that does one task after the other, while the threads that submitted the tasks go on.

The worker takes the most urgent of the tasks that are ready. A task that needs something of a device or a disk has an
event for it. If no task is ready, the thread waits for the event of the task that was submitted first, because devices
work in order. If that wait fails, because a disk has stopped answering, the task starts all the same, so that it raises
the error. A long task can let in tasks that are more urgent.

In a simulation there are no threads: tasks run in the thread that submits them or waits for them, one after the other.
With virtual time each worker has a track of the clock, and tasks run in the order of their times: a task begins once
the training loop's thread, or the thread that waits for it, has got to that time, so that everything that was submitted
before is there to choose from.
"""

from __future__ import annotations

import atexit
import itertools
import math
import threading
import weakref
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from shardwell import virtual_time
from shardwell.errors import ShardwellError
from shardwell.memory import Device, Event
from shardwell.memory.timing import Waitable
from shardwell.memory.virtual_streams import VirtualEvent, VirtualGate, after_thread, point_of, thread_event
from shardwell.offload.cores import stay_on
from shardwell.spans import waiting
from shardwell.virtual_time.virtual_clock import IDLE, Track, TrackPoint, VirtualClock

_MOST_LET_IN = 8  # tasks that have begun and are not done, because each let in the next


class Turns:
    """A schedule in place of threads in a simulation: the workers of one engine run their tasks in turns."""

    def __init__(self) -> None:
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._is_running = False

    def enter(self, worker: Worker) -> None:
        """Add a worker."""
        self._workers.add(worker)

    def run_ready(self) -> None:
        """Run all tasks that can run, unless this is called inside of one: what it submits runs after it."""
        if self._is_running:
            return
        self._is_running = True
        try:
            while self.run_one():
                pass
        finally:
            self._is_running = False

    def run_one(self) -> bool:
        """Run the next task of the first worker that has one it may run; return false if there is none."""
        return any(worker.run_one() for worker in sorted(self._workers, key=lambda worker: worker.place))


class TimedTurns(Turns):
    """Workers with tracks of a clock: of all tasks, the one that begins first is next."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        clock.progress = self.run_one

    def run_ready(self) -> None:
        """Run all tasks that begin before the present time of the thread, unless this is called inside of one."""
        while not self._is_running and self._run_before(self.clock.thread.at):
            pass

    def run_one(self) -> bool:
        """Run the task that begins first; return false if there is none."""
        return self._run_before(math.inf)

    def _run_before(self, time: float) -> bool:
        found = [(begin, worker.place, worker) for worker in self._workers if (begin := worker.next_time) is not None]
        begin, _, worker = min(found, default=(math.inf, 0, None))
        if worker is None or begin > time:
            return False
        before, self._is_running = self._is_running, True
        try:
            with self.clock.on_thread(worker.track):
                worker.run_next(begin)
        finally:
            self._is_running = before
        return True


def turns_of(device: Device) -> Turns | None:
    """Return what takes the place of threads on a device: nothing on a real one."""
    if not device.is_simulated:
        return None
    return Turns() if virtual_time.clock is None else TimedTurns(virtual_time.clock)


class TaskHandle:
    """A handle to a task of a worker."""

    turns: Turns | None = None  # of a simulation
    ended: VirtualEvent | None = None  # in a simulation with virtual time, at the end of the task

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def has_passed(self) -> bool:
        """Whether the task has ended, successfully or not."""
        if isinstance(self.turns, TimedTurns):
            self.turns.run_ready()
            return self._done.is_set() and (self.ended is None or self.ended.is_done)
        return self._done.is_set()

    @property
    def has_succeeded(self) -> bool:
        """Whether the task has ended without an error."""
        return self.has_passed and self._error is None

    def wait(self) -> None:
        """Block until the task is done, and raise what it raised."""
        while self.turns is not None and not self._done.is_set():
            if not self.turns.run_one():
                raise ShardwellError("a task of the simulation waits for a task that cannot run")
        if self.ended is not None:
            self.ended.synchronize()
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
            self._end()

    def fail(self, error: BaseException) -> None:
        """Mark the task as failed."""
        self._error = error
        self._end()

    def _end(self) -> None:
        if isinstance(self.turns, TimedTurns):
            self.ended = thread_event(self.turns.clock)
        self._done.set()


@dataclass(eq=False)
class _Task:
    number: int
    urgency: int  # lower values are done sooner
    work: Callable[[], None]
    after: Waitable
    ticket: TaskHandle


class _Agenda:
    """The tasks of a worker's thread, the most urgent first; of equal ones, the one that was submitted first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: list[_Task] = []
        self._is_over = False

    def add(self, task: _Task) -> None:
        with self._changed:
            insort(self._tasks, task, key=attrgetter("urgency", "number"))
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

    @property
    def is_over(self) -> bool:
        """Whether `end` was called."""
        return self._is_over

    @property
    def has_tasks(self) -> bool:
        """Whether there are tasks that have not begun."""
        return bool(self._tasks)

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
                first = min(self._tasks, key=attrgetter("number"))
            first.after.synchronize()
            if not first.after.is_done and self._remove(first):
                return first

    def take_before(self, urgency: int) -> _Task | None:
        """Return a ready task that is more urgent than that, if there is one."""
        with self._changed:
            task = self._best(urgency)
            if task is not None:
                self._tasks.remove(task)
            return task

    def _remove(self, task: _Task) -> bool:
        with self._changed:
            if task not in self._tasks:
                return False
            self._tasks.remove(task)
            return True

    def _best(self, urgency: float = math.inf) -> _Task | None:
        """Return the most urgent task that is ready, of those that are more urgent than that.

        Events are asked until one has passed, and not those of all tasks. What was asked before is asked again then: a
        task may wait for a more urgent one that has an earlier event, and that event may have passed in the meantime.
        """
        first = self._tasks[0] if self._tasks else None
        if first is not None and first.urgency < urgency and first.after.is_done:
            return first  # none is more urgent
        found: _Task | None = None
        before = [task for task in self._tasks if task.urgency < urgency]
        while (place := next((n for n, task in enumerate(before) if task.after.is_done), None)) is not None:
            found, before = before[place], before[:place]
        return found

    def first_ready(self) -> TrackPoint | None:
        """Return when the first task is ready, in a simulation with virtual time."""
        points = [point for task in self._tasks if (point := point_of(task.after)) is not None]
        return min(points, key=lambda point: point.time, default=None)


class Worker:
    """A thread that starts with the first task, and ends after its current task with this object or the process."""

    def __init__(
        self,
        name: str,
        cores: Sequence[int] | None = None,
        gate: threading.Semaphore | None = None,
        turns: Turns | None = None,
    ) -> None:
        """Keep the thread, and the threads that it starts, on `cores` if they are given.

        With a `gate`, the thread acquires it before it selects and runs each task. With `turns` there is no thread.
        """
        self.turns, self.place, self.track = turns, next(_places), Track(name)
        if turns is not None:
            turns.enter(self)
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
        if self.turns is not None:
            return self._submit_in_turn(work, urgency, after, ticket)
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

    def _submit_in_turn(
        self, work: Callable[[], None], urgency: int, after: Waitable | None, ticket: TaskHandle | None
    ) -> TaskHandle:
        assert self.turns is not None
        task = _Task(next(self._numbers), urgency, work, after_thread(after or Event()), ticket or self.new_handle())
        self._agenda.add(task)
        self.turns.run_ready()
        return task.ticket

    def run_one(self) -> bool:
        """Run the most urgent task in this thread; return false if there is none, or if the gate is closed."""
        if not self._agenda.has_tasks or (self._gate is not None and not self._gate.acquire(blocking=False)):
            return False
        task = self._agenda.take()
        assert task is not None
        task.ticket.run(task.work)
        return True

    @property
    def next_time(self) -> float | None:
        """When the next task begins, in a simulation with virtual time; None if there is none, or the gate is shut."""
        ready = self._agenda.first_ready()
        if ready is None or (isinstance(self._gate, VirtualGate) and not self._gate.is_open):
            return None
        opens = self._gate.next if isinstance(self._gate, VirtualGate) else None
        return max(self.track.at, ready.time, 0.0 if opens is None else opens.time)

    def run_next(self, begin: float) -> None:
        """Run the most urgent task that is ready at a time; the clock's thread is that of this worker."""
        if self._gate is not None:
            self._gate.acquire()
        ready = self._agenda.first_ready()
        assert ready is not None
        self.track.take_over(ready.track, ready.time)
        self.track.fill(begin, IDLE)
        task = self._agenda.take()
        assert task is not None
        task.ticket.run(task.work)

    def new_handle(self) -> TaskHandle:
        """Return a handle to a task that is submitted later."""
        handle = TaskHandle()
        handle.turns = self.turns
        return handle

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
    _own.agenda = agenda
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


def is_ended() -> bool:
    """Return whether this thread is that of a worker that has ended.

    What its task waits for may never come then: tasks that had not begun were dropped, and with them what they would
    have released.
    """
    agenda: _Agenda | None = getattr(_own, "agenda", None)
    return agenda is not None and agenda.is_over


_own = threading.local()  # `agenda`: that of the worker whose thread this is
_places = itertools.count()  # in which order workers were made
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
