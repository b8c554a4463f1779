"""Collectives that a step leaves in flight, and that a rank finishes before it leaves.

At stages 1 and 2 a step returns while the updated parameters are still being all-gathered. A rank whose script ends
there, or whose engine is freed, would close its links while a slower rank still has to receive from it.

Nothing here may keep an engine alive: works lead to transports, and these to the engine. So only the owner holds what
is in flight, until it is freed itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from queue import SimpleQueue

from shardwell.memory import Device
from shardwell.parallel.agreement import Agreement
from shardwell.parallel.transport import Work

_LONGEST = 30.0  # seconds for what peers that may be gone have a part in
_MOMENT = 1.0  # seconds that the end of an engine takes at most: peers that are in the same step need less
_PAUSE = 1e-3  # seconds between two looks at a GPU

_all: weakref.WeakSet[LeftInFlight] = weakref.WeakSet()
_orphans: SimpleQueue[tuple[LeftInFlight | None, threading.Event]] = SimpleQueue()  # whose owners are gone
_threads: list[threading.Thread] = []  # the one that waits for them, once there are any


class LeftInFlight:
    """The collectives that a unit has left in flight. Only the unit holds it; it is finished before both are freed."""

    def __init__(self, agreement: Agreement, device: Device) -> None:
        self.works: list[Work] = []
        self._agreement, self._device, self._process = agreement, device, os.getpid()
        _all.add(self)

    def __del__(self) -> None:
        """Let a thread finish what the owner can wait for no more. The caller may be the garbage collector."""
        if not sys.is_finalizing() and self.is_awaited:
            is_behind_others = not _orphans.empty()
            is_over = _hand_over(self)
            if not is_behind_others:
                is_over.wait(_MOMENT)  # usually it is over by then, and the memory of the engine is freed at once

    @property
    def is_awaited(self) -> bool:
        """Return whether peers may wait for a part of this rank. A process that it has forked has no part in it."""
        if self._device.is_simulated or self._process != os.getpid() or self._agreement.failures.has_failed:
            return False
        return not all(work.is_done for work in self.works)

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
        _hand_over(None).wait(_LONGEST)


def _hand_over(left: LeftInFlight | None) -> threading.Event:
    """Let the thread finish this after what it has; return what is set when it has done so."""
    if not _threads:
        _threads.append(threading.Thread(target=_serve, name="shardwell finishes", daemon=True))
        _threads[0].start()
    is_over = threading.Event()
    _orphans.put((left, is_over))
    return is_over


def _serve() -> None:
    while True:
        left, is_over = _orphans.get()
        if left is not None:
            left.finish()
        del left  # and with it the memory of the collectives
        is_over.set()
