"""Times of the device's work: points that are waited for, moments on a stream, a stopwatch over what is enqueued."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Waitable(Protocol):
    """A point of work that the host can wait for."""

    @property
    def is_done(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class AllOf:
    """A waitable that is done when all of several others are."""

    of: Sequence[Waitable]

    @property
    def is_done(self) -> bool:
        return all(one.is_done for one in self.of)

    def synchronize(self) -> None:
        for one in self.of:
            one.synchronize()


@dataclass(frozen=True)
class Moment:
    """A time: on CUDA that at which a stream gets to a point of its work, elsewhere that of the host's clock."""

    seconds: float  # of the host's clock, when the point was enqueued
    event: torch.cuda.Event | None = None

    def since(self, earlier: Moment) -> float:
        """Return the seconds since an earlier moment of the same device. On CUDA this waits for both."""
        if self.event is None or earlier.event is None:
            return self.seconds - earlier.seconds
        self.event.synchronize()
        earlier.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class Stopwatch:
    """Measures how long the device works on what is enqueued inside, over several uses; on the cpu, the host's time."""

    def __init__(self, *, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        self.reset()

    def reset(self) -> None:
        """Begin a new measurement."""
        self._seconds, self._spans = 0.0, list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Measure what is enqueued from here on."""
        if self._on_cuda:
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()
        else:
            self._since = time.perf_counter()

    def stop(self) -> None:
        """Measure up to here."""
        if self._on_cuda:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._spans.append((self._begin, end))
        else:
            self._seconds += time.perf_counter() - self._since

    def seconds(self) -> float:
        """Return the sum of the times; on a GPU this waits for the last one."""
        if self._spans:
            self._spans[-1][1].synchronize()
            self._seconds += sum(begin.elapsed_time(end) for begin, end in self._spans) / 1e3
            self._spans.clear()
        return self._seconds
