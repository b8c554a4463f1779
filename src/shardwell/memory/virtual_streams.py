"""Streams and events of a simulation, with times of its clock instead of CUDA's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from shardwell import virtual_time
from shardwell.memory.streams import Event, Stream
from shardwell.memory.timing import AllOf, Waitable
from shardwell.virtual_time.virtual_clock import Track, TrackPoint, VirtualClock


@dataclass(frozen=True)
class VirtualEvent(Event):
    """A time of a track."""

    clock: VirtualClock | None = None
    point: TrackPoint | None = None

    @property
    def time(self) -> float:
        """The seconds at which it passes."""
        assert self.point is not None
        return self.point.time

    def wait(self) -> None:
        """Order the current stream behind this event, without blocking the host."""
        assert self.clock is not None
        assert self.point is not None
        self.clock.now()
        self.clock.stream.take_over(self.point.track, self.point.time)

    @property
    def is_done(self) -> bool:
        """Return whether the event has passed at the time of the current thread."""
        assert self.clock is not None
        return self.time <= self.clock.thread.at

    def synchronize(self) -> None:
        """Let the current thread wait until the event has passed."""
        assert self.clock is not None
        assert self.point is not None
        self.clock.thread.take_over(self.point.track, self.point.time)


@dataclass(frozen=True)
class VirtualStream:
    """A track of the clock."""

    clock: VirtualClock
    track: Track

    def after_current(self) -> AbstractContextManager[None]:
        """Return a context that gives work to this stream, behind what the caller's stream has been given so far."""
        return self._behind(self.clock.now())

    def after(self, event: Event, /) -> AbstractContextManager[None]:
        """Return a context, for any thread, that gives work to this stream, behind an event on another one."""
        return self._behind(event.point if isinstance(event, VirtualEvent) else None)

    @contextlib.contextmanager
    def _behind(self, point: TrackPoint | None) -> Iterator[None]:
        with self.clock.on_stream(self.track):
            if point is not None:
                self.track.take_over(point.track, point.time)
            yield

    def record(self) -> Event:
        """Return an event behind the work that this stream has been given so far."""
        return VirtualEvent(clock=self.clock, point=TrackPoint(self.track.at, self.track))


def virtual_stream(clock: VirtualClock, name: str) -> Stream:
    """Return a new stream of a clock."""
    return VirtualStream(clock=clock, track=Track(name))


def virtual_event(clock: VirtualClock, stream: Stream | None = None) -> VirtualEvent:
    """Return an event behind what a stream, by default the current one, has been given so far."""
    track = stream.track if isinstance(stream, VirtualStream) else None
    return VirtualEvent(clock=clock, point=clock.now() if track is None else TrackPoint(track.at, track))


def thread_event(clock: VirtualClock) -> VirtualEvent:
    """Return an event at the time of the current thread."""
    return VirtualEvent(clock=clock, point=clock.thread_now())


def point_of(waitable: Waitable) -> TrackPoint | None:
    """Return the time at which something that can be waited for passes; None if it has passed at any time."""
    if isinstance(waitable, AllOf):
        points = [point for one in waitable.of if (point := point_of(one)) is not None]
        return max(points, key=lambda point: point.time, default=None)
    return getattr(waitable, "point", None)


def after_thread(waitable: Waitable) -> Waitable:
    """Return what passes after something else, and not before the present time of the current thread."""
    return waitable if virtual_time.clock is None else AllOf([waitable, thread_event(virtual_time.clock)])


class VirtualGate(threading.Semaphore):
    """A semaphore of a simulation: each permit has the time from which on it may be acquired."""

    def __init__(self, clock: VirtualClock, value: int = 1) -> None:
        super().__init__(value)
        self._clock = clock
        self._permits: list[TrackPoint | None] = [None] * value

    @property
    def next(self) -> TrackPoint | None:
        """When the first permit may be acquired; None: at any time. There must be one."""
        return min(self._permits, key=_time)

    @property
    def is_open(self) -> bool:
        """Whether there is a permit, at whatever time."""
        return bool(self._permits)

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Acquire a permit; a thread that blocks waits for it, while workers run."""
        thread = self._clock.thread
        if not blocking and not (self._permits and _time(self.next) <= thread.at):
            return False
        self._clock.progress_until(lambda: self.is_open)
        first = self.next
        self._permits.remove(first)
        if first is not None:
            thread.take_over(first.track, first.time)
        return True

    def release(self, n: int = 1) -> None:
        """Add permits from the present time of the current thread on."""
        self._permits += [self._clock.thread_now()] * n


def gate(value: int = 1) -> threading.Semaphore:
    """Return a semaphore, in a simulation with virtual time one of its own."""
    return threading.Semaphore(value) if virtual_time.clock is None else VirtualGate(virtual_time.clock, value)


def _time(point: TrackPoint | None) -> float:
    return 0.0 if point is None else point.time
