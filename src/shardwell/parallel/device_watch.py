"""A watch over the other ranks for a rank whose device waits for them, while its host may be anywhere.

With gloo the host waits for a collective, and looks at what other ranks do meanwhile. With NCCL the device waits, and
the host sooner or later for the device, where nothing wakes it. So the thread of the heartbeats looks: if a rank has
failed, or has ended before a collective that this rank has begun, it notes the first cause and aborts the
communicators, which ends the wait. The next call of the engine raises that cause. A slow rank is named in the log.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shardwell.errors import PeerError, ShardwellError
from shardwell.parallel.rank_store import RankStore
from shardwell.parallel.wait_reports import WaitReports

if TYPE_CHECKING:
    from shardwell.parallel.agreement import Agreement

_LONGEST_PAUSE = 5.0  # seconds between two looks at what slow ranks do


class DeviceWatch:
    """The watch of one engine. Its thread has a connection to the store of its own."""

    def __init__(self, store: Any) -> None:
        self._board = RankStore(store, _without_store)
        self._num_announced = -1
        self._since = self._next = 0.0
        self._reports: WaitReports | None = None

    def look(self, agreement: Agreement) -> None:
        """Raise the first cause if a rank has failed or ended, once it is noted and the communicators are aborted."""
        agreement.failures.check(self._board)
        agreement.failures.check_exits(agreement.tokens.num_announced, self._board)
        self._look_for_slow_ranks(agreement)

    def _look_for_slow_ranks(self, agreement: Agreement) -> None:
        """Log which ranks are behind, if this rank has announced nothing new for the time limit."""
        now, num_announced = time.monotonic(), agreement.tokens.num_announced
        if num_announced != self._num_announced:
            self._num_announced, self._since, self._next = num_announced, now, now + agreement.time_limit
            self._reports = None
        elif now >= self._next:
            self._next = now + _LONGEST_PAUSE
            self._reports = self._reports or WaitReports(agreement.time_limit)
            if behind := agreement.behind():
                self._reports(now - self._since, behind, agreement.tokens.last)


def _without_store(error: Exception) -> ShardwellError:
    """Return the error that ends this thread: the code that needs the store reports that it has ended."""
    return PeerError(str(error))
