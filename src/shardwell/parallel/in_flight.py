"""Collectives that a step leaves in flight, and that a rank finishes before it leaves.

At stages 1 and 2 a step returns while the updated parameters are still being all-gathered. A rank whose script ends
there, or whose engine is freed, would close its links while a slower rank still has to receive from it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from queue import SimpleQueue

from shardwell.memory import Device
from shardwell.parallel.agreement import Agreement
from shardwell.parallel.transport import Work

_LONGEST = 30.0  # seconds for what peers that may be gone have a part in
_PAUSE = 1e-3  # seconds between two looks at a GPU

_all: set[LeftInFlight] = set()  # of owners that live
_orphans: SimpleQueue[LeftInFlight | threading.Event] = SimpleQueue()  # of owners that do not
_threads: list[threading.Thread] = []  # the one that waits for them, once there are any


class LeftInFlight:
    """The collectives that an owner has left in flight. It outlives its owner until they are finished."""

    def __init__(self, owner: object, agreement: Agreement, device: Device) -> None:
        self.works: list[Work] = []
        self._agreement, self._device = agreement, device
        _all.add(self)
        weakref.finalize(owner, _orphan, self).atexit = False

    @property
    def is_awaited(self) -> bool:
        """Return whether peers may wait for a part of this rank."""
        is_left = not all(work.is_done for work in self.works)
        return is_left and not self._device.is_simulated and not self._agreement.failures.has_failed

    def finish(self) -> None:
        """Wait for the collectives, on the host."""
        with contextlib.suppress(Exception):  # a peer that is gone is told to whoever uses the engine
            for work in self.works:
                work.wait()
        with self._device.all_gather_stream.after_current():
            event = self._device.all_gather_stream.record()
        deadline = time.monotonic() + _LONGEST
        while not event.is_done and time.monotonic() < deadline:
            time.sleep(_PAUSE)


def finish() -> None:
    """Wait for all that is in flight in this process; it is about to end."""
    for left in list(_all):
        if left.is_awaited:
            left.finish()
    if _threads:
        is_over = threading.Event()
        _orphans.put(is_over)
        is_over.wait(_LONGEST)


def _orphan(left: LeftInFlight) -> None:
    """Let a thread finish what the owner can wait for no more: the caller may be the garbage collector."""
    _all.discard(left)
    if left.is_awaited:
        if not _threads:
            _threads.append(threading.Thread(target=_serve, name="shardwell finishes", daemon=True))
            _threads[0].start()
        _orphans.put(left)


def _serve() -> None:
    while True:
        left = _orphans.get()
        if isinstance(left, threading.Event):
            left.set()
        else:
            left.finish()
        del left  # and with it the memory of the collectives
