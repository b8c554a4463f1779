"""Streams and events: orders of work on a device, and points of them.

A `Stream` is a `CudaStream`, or the `ProgramOrder` on cpu and meta, where the process group's own threads provide the
overlap. An `Event` is a point on a stream that another stream can wait for. A simulation with virtual time has streams
and events of its own (`memory/virtual_streams.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Event:
    """A point on a stream. `wait` orders the current stream behind it; the host goes on."""

    event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Order the current stream behind this event, without blocking the host."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    @property
    def is_done(self) -> bool:
        """Return whether the event has passed."""
        return self.event is None or self.event.query()

    def synchronize(self) -> None:
        """Block the host until the event has passed."""
        if self.event is not None:
            self.event.synchronize()


NO_EVENT = Event()  # a point that has passed


class Stream(Protocol):
    """An order of work beside the current stream."""

    def after_current(self) -> AbstractContextManager[None]:
        """Return a context that enqueues work on this stream, behind what the caller's stream has been given so far."""
        ...

    def after(self, event: Event, /) -> AbstractContextManager[None]:
        """Return a context, for any thread, that enqueues work on this stream, behind an event on another one."""
        ...

    def record(self) -> Event:
        """Return an event behind the work that this stream has been given so far."""
        ...


class ProgramOrder:
    """The stream of devices that have none: work is done when its call returns, so nothing is waited for."""

    after_current = staticmethod(contextlib.nullcontext)

    def after(self, event: Event, /) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def record(self) -> Event:
        """Return an event that has passed."""
        return NO_EVENT


@dataclass(frozen=True)
class CudaStream:
    """A stream of CUDA's."""

    stream: torch.cuda.Stream

    def after_current(self) -> AbstractContextManager[None]:
        """Return a context that enqueues work on this stream, behind what the caller's stream has been given so far."""
        return _enqueue_after_current(self.stream)

    def after(self, event: Event, /) -> AbstractContextManager[None]:
        """Return a context, for any thread, that enqueues work on this stream, behind an event on another one."""
        return _enqueue_after(self.stream, event)

    def record(self) -> Event:
        """Return an event behind the work that this stream has been given so far."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return Event(event)


@contextlib.contextmanager
def _enqueue_after_current(stream: torch.cuda.Stream) -> Iterator[None]:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


@contextlib.contextmanager
def _enqueue_after(stream: torch.cuda.Stream, event: Event) -> Iterator[None]:
    with torch.cuda.stream(stream):
        event.wait()
        yield
