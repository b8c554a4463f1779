"""A lane on the host: a thread that does what it is given, one thing after the other, while the caller goes on."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence

from shardwell.memory.cores import stay_on


class Ticket:
    """Work that a worker was given."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def has_passed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        """Block until it is done; raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()


class Worker:
    """The thread starts with the first piece of work and ends with this object."""

    def __init__(self, name: str, cores: Sequence[int] | None = None) -> None:
        """With `cores`, the thread and those that it starts stay on them."""
        self._name, self._cores = name, cores
        self._queue: queue.SimpleQueue[tuple[Ticket, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> Ticket:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._queue, self._cores), name=self._name, daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        ticket = Ticket()
        self._queue.put((ticket, work))
        return ticket


def _serve(waiting: queue.SimpleQueue[tuple[Ticket, Callable[[], None]] | None], cores: Sequence[int] | None) -> None:
    if cores is not None:
        stay_on(cores)
    while (item := waiting.get()) is not None:
        ticket, work = item
        ticket.run(work)
        del item, ticket, work  # what they hold must not outlive them here
