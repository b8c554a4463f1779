"""Waiting for a rank that does not arrive: it may be slow, which is no error, or it will never arrive.

A slow rank is named in the log with what it does, once the time limit for divergences is over and with growing
intervals after that. The other ranks wait for it until the timeout of the process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardwell.errors import DivergenceError, PeerError
from shardwell.parallel.circles import CircleWatch
from shardwell.parallel.rank_store import between
from shardwell.parallel.wait_reports import WaitReports, listed

if TYPE_CHECKING:
    from shardwell.parallel.agreement import Agreement

_FIRST_LOOK, _LONGEST_PAUSE = 1.0, 5.0  # seconds, between two checks of what other ranks do
_FIRST_PROBE, _PROBE_EVERY = 4, 16  # counted in calls of a `FailurePoll`


class PeerWait:
    """One wait of a rank until all ranks have arrived at the same token."""

    def __init__(self, agreement: Agreement, key: str, token: str, expected: str, limit: float) -> None:
        self._agreement, self._key, self._token, self._expected = agreement, key, token, expected
        self._limit = limit
        self._begin = time.monotonic()
        self._next = _FIRST_LOOK
        self._report = WaitReports(agreement.time_limit)
        self._circles = CircleWatch(agreement)

    def look(self) -> None:
        """Raise if a rank is gone or went on to something else, and report slow ranks; to be called repeatedly.

        One of the ranks that wait looks at the others. It tells all ranks if it raises.
        """
        self._circles.look()
        waited = time.monotonic() - self._begin
        if waited < self._next:
            return
        self._next = waited + min(waited, _LONGEST_PAUSE)
        agreement = self._agreement
        agreement.probe()
        if not agreement.is_first(f"{self._key}/looks"):
            return
        missing = agreement.missing(self._key)
        signs = {rank: agreement.sign_of(rank) for rank in missing}
        for rank, sign in signs.items():
            if sign is not None and (agreement.is_left_by(sign) or agreement.is_crossed_by(sign)):
                raise agreement.fail(self._divergence(rank, f" but went on without it, and is {sign}"))
            if sign is None and waited > agreement.time_limit:
                raise agreement.fail(self._divergence(rank, f" within {agreement.time_limit:g} s"))
        known = {rank: sign for rank, sign in signs.items() if sign is not None}
        if waited > self._limit:
            raise agreement.fail(
                PeerError(
                    f"{listed(known)} did not come to '{self._token}' within {self._limit:g} s, the timeout of the "
                    "process group. Give it more (init_process_group(timeout=...)), or the rank less to do alone"
                )
            )
        if known:
            self._report(waited, known, self._token)

    def _divergence(self, rank: int, how: str) -> DivergenceError:
        agreement = self._agreement
        else_ = f"; the step so far leads to '{self._expected}'" if self._expected else ""
        return DivergenceError(
            f"ranks diverge: rank {agreement.rank} is about to run '{self._token}', but rank {rank} did not join it"
            f"{how}{else_}. {agreement.way_out(self._token, self._expected)}"
        )


class FailurePoll:
    """A check that a rank makes repeatedly, about twice a second, while it waits for data from other ranks."""

    def __init__(self, agreement: Agreement | None, probe: Callable[[], None]) -> None:
        """Begin a wait. `probe` raises if a link to another rank is broken."""
        self._agreement, self._probe = agreement, probe
        self._stragglers = None if agreement is None else Stragglers(agreement)
        self._times = 0
        self._next = 0.0

    def __call__(self) -> None:
        """Raise if waiting has become useless, and report ranks that are behind."""
        self._times += 1
        if self._agreement is not None and (now := time.monotonic()) >= self._next:
            self._next = now + between(0.0, self._agreement.size)
            self._agreement.failures.check()
        # Probes become rarer, up to a limit, because each one posts a receive that stays posted.
        if self._times >= _FIRST_PROBE and (self._times & (self._times - 1) == 0 or self._times % _PROBE_EVERY == 0):
            if self._agreement is not None:
                self._agreement.check_exits()
            self._probe()
        if self._stragglers is not None:
            self._stragglers.look()


class Stragglers:
    """A wait for data from other ranks. `look` is called twice a second until the data has come."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._begin = time.monotonic()
        self._next = agreement.time_limit / 2  # before the first report, so that it knows which ranks are silent
        self._report = WaitReports(agreement.time_limit)
        self._circles = CircleWatch(agreement)

    def look(self) -> None:
        """Raise if ranks wait for each other, in different engines or in a circle, and report ranks that are behind."""
        self._circles.look()
        waited = time.monotonic() - self._begin
        if waited < self._next:
            return
        self._next = waited + min(waited, _LONGEST_PAUSE)
        behind = self._agreement.behind()
        for rank, sign in behind.items():
            if self._agreement.is_crossed_by(sign):
                raise self._agreement.fail(
                    DivergenceError(
                        f"ranks diverge: rank {self._agreement.rank} waits in '{self._agreement.tokens.last}', but "
                        f"rank {rank} waits for it in another engine. Use engines in the same order on all ranks."
                    )
                )
        if behind:
            self._report(waited, behind, self._agreement.tokens.last)
