"""What moves the bytes of a collective: the protocol of transports, and the handle that they return.

A transport only moves bytes. `Collectives` announces and counts a collective before it calls one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

STAGING = "(staging)"  # the unit under which staging buffers of collectives are counted


class Work:
    """A collective in flight. `wait` may be called any number of times; the first call finishes the work.

    To finish is to call the callbacks once, in order.
    """

    def __init__(self, *callbacks: Callable[[], object]) -> None:
        self._callbacks = list(callbacks)

    @property
    def is_done(self) -> bool:
        """Return whether `wait` has been called, or nothing was in flight."""
        return not self._callbacks

    def wait(self) -> None:
        """Wait for the collective, in the way that its backend needs: on the host or on the current stream."""
        callbacks, self._callbacks = self._callbacks, []  # if one of them raises, the others are never called
        while callbacks:
            callbacks.pop(0)()  # what a callback holds is freed before the next one is called

    def start_next_hop(self) -> bool:
        """Wait for the first hop and start the second; return false if there is no second hop that has not started."""
        return False

    def then(self, more: Callable[[], object]) -> Work:
        """Let `wait` also call `more`, after everything else; return this work."""
        self._callbacks.append(more)
        return self

    def then_start(self, start: Callable[[], Work]) -> Work:
        """Return a work of two hops: this collective is the first, and `start` starts the second."""
        return _TwoHops(self, start)


class _TwoHops(Work):
    """A collective of two hops, the second of which the host starts when the first is over."""

    def __init__(self, first: Work, start: Callable[[], Work]) -> None:
        super().__init__()
        self._first = first
        self._start: Callable[[], Work] | None = start  # None once the second hop is started

    @property
    def is_done(self) -> bool:
        return self._start is None and super().is_done

    def wait(self) -> None:
        self.start_next_hop()
        super().wait()

    def start_next_hop(self) -> bool:
        if self._start is None:
            return False
        start, self._start = self._start, None
        callbacks, self._callbacks = self._callbacks, []  # if a hop raises, they are never called
        self._first.wait()
        self._callbacks = [start().wait, *callbacks]
        return True


class ObservedWork(Work):
    """A collective in flight of which somebody is told when its wait begins and ends."""

    def __init__(self, work: Work, waits: Callable[[], object], ended: Callable[[], object]) -> None:
        super().__init__()
        self._work, self._waits = work, waits
        self._ended: Callable[[], object] | None = ended

    @property
    def is_done(self) -> bool:
        return self._work.is_done

    def wait(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            self._waits()
        self._work.wait()
        if ended is not None:
            ended()

    def start_next_hop(self) -> bool:
        return self._work.start_next_hop()

    def then(self, more: Callable[[], object]) -> Work:
        self._work.then(more)
        return self


class Transport(Protocol):
    """A way to move the bytes of all-gathers and reduce-scatters."""

    def all_gather(self, flat: Tensor) -> Work:
        """Start the all-gather of `flat` in place; this rank's own shard is in it already."""

    def reduce_scatter(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        """Start `into` = (or +=) `scale` x the sum over ranks of this rank's shard of `flat`, which becomes invalid."""


class DirectTransport(Transport, Protocol):
    """A transport between all ranks of one process group, which also serves the other collectives."""

    sends_shards: bool  # `scatter` sends each rank its shard; if not, it sends everything to all ranks

    def all_to_all(self, sent: Tensor, received: Tensor) -> Work:
        """Start to send the r-th of equal parts of `sent` to rank r, and to receive the r-th of `received` from it."""

    def all_reduce(self, part: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        """Start `into` = (or +=) `scale` x the sum over ranks of `part`, which becomes invalid.

        All ranks get the same bits.
        """

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send outgoing[r] to rank r and receive incoming[r] from it; this rank's own parts are equal already."""

    def scatter(self, flat: Tensor, into: Tensor, source: int, shard_indices: Sequence[int]) -> None:
        """Copy this rank's shard of `source`'s `flat` to `into`; shard_indices[r] is the index of rank r's shard."""

    def wait(self, works: list[Any]) -> None:
        """Wait for works of torch.distributed; raise the cause if one of them fails."""
