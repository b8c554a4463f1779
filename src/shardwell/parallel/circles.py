"""Ranks that wait for each other in a circle, over any mixture of waits: a divergence that no single wait can see.

A rank that waits for long follows, by the heartbeats, from itself to the ranks that it needs, to those that these need,
and so on. If every rank that it reaches waits for a rank that it reaches, none of them will ever go on. A rank that
does not wait, or whose data is on the way, is no part of that: the others may wait for it as long as it takes.

What heartbeats say is old, and of different times. So two looks must find the same waits, and the second one heartbeats
of every rank that were begun after the first look: then all these waits were there at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from shardwell.errors import DivergenceError
from shardwell.parallel.rank_store import between

if TYPE_CHECKING:
    from shardwell.parallel.agreement import Agreement
    from shardwell.parallel.heartbeat import Heartbeat

_PAUSE, _SHORT_PAUSE = 5.0, 0.5  # seconds between two looks: at most without a circle, and to be sure of one
_NEW_BEATS = 2  # the next heartbeat may have been begun before a look, the one after it was not
_MOST_THAT_LOOK = 256  # with more ranks, one of those that wait for the same looks
_MOST_LINKS = 8  # that are told
_QUESTIONS = 3  # to the store, for which `between` counts a pause
_EACH = 2  # questions for a heartbeat


class CircleWatch:
    """The look for circles during one wait of a rank."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._begin = time.monotonic()
        self._next = agreement.time_limit / 2
        self._before: dict[int, Heartbeat] = {}  # of the ranks that seem to wait for each other
        self._num_asked = 0

    def look(self) -> None:
        """Raise if this rank waits for ranks that wait for each other; to be called repeatedly during the wait."""
        waited = time.monotonic() - self._begin
        if waited < self._next:
            return
        self._num_asked = 0
        stuck = self._stuck() if self._looks else {}
        if stuck and self._is_sure(stuck) and waited >= self._agreement.time_limit:
            error = self._agreement.fail(_error(self._agreement, stuck))
            self._agreement.failures.check()  # another rank may have found it first: all raise the same words
            raise error
        least = between(_SHORT_PAUSE, self._agreement.whole.size) * self._num_asked * _EACH / _QUESTIONS
        self._next = waited + max(_SHORT_PAUSE if stuck else min(waited / 2, _PAUSE), least)

    @property
    def _looks(self) -> bool:
        """Whether this rank looks, of those that wait for the same."""
        wait = self._agreement.waits.current
        if wait is None or self._agreement.whole.size <= _MOST_THAT_LOOK:
            return wait is not None
        return self._agreement.whole.is_first(f"circle/{wait.needs[0].key}/{wait.needs[0].at}")

    def _is_sure(self, stuck: dict[int, Heartbeat]) -> bool:
        """Return whether all ranks have waited since the first look that found them so."""
        before = self._before
        if _numbers(before) != _numbers(stuck):
            self._before = stuck
            return False
        return all(sign.beat >= before[rank].beat + _NEW_BEATS for rank, sign in stuck.items())

    def _stuck(self) -> dict[int, Heartbeat]:
        """Return the ranks that this one needs, directly or not; nothing if one of them may go on."""
        signs: dict[int, Heartbeat | None] = {}

        def sign_of(rank: int) -> Heartbeat | None:
            if rank not in signs:
                signs[rank] = self._agreement.sign_of(rank)
                self._num_asked += 1
            return signs[rank]

        stuck: dict[int, Heartbeat] = {}
        ahead = [self._agreement.rank]
        while ahead:
            rank = ahead.pop()
            sign = sign_of(rank)
            if sign is None or sign.wait is None:
                return {}
            if rank in stuck:
                continue
            stuck[rank] = sign
            needed = []
            for need in sign.wait.needs:
                for other in need.ranks:
                    theirs = sign_of(other)
                    if theirs is None:
                        return {}
                    if theirs.positions.get(need.key, 0) < need.at:
                        if theirs.wait is None:
                            return {}
                        needed.append(other)
            if not needed:  # its data is on the way
                return {}
            ahead += needed
        return stuck


def _numbers(signs: Mapping[int, Heartbeat]) -> dict[int, int]:
    return {rank: sign.wait.number for rank, sign in signs.items() if sign.wait is not None}


def _links(stuck: Mapping[int, Heartbeat], rank: int) -> Iterator[tuple[int, str]]:
    """Yield the ranks that a rank needs, with what it waits for."""
    wait = stuck[rank].wait
    for need in () if wait is None else wait.needs:
        for other in need.ranks:
            if stuck[other].positions.get(need.key, 0) < need.at if other in stuck else False:
                yield other, need.what


def _error(agreement: Agreement, stuck: Mapping[int, Heartbeat]) -> DivergenceError:
    """Return the error that names each rank of a circle with what it waits for, and the ranks that deviate."""
    deviating = {rank: sign.wait.expected for rank, sign in sorted(stuck.items()) if sign.wait and sign.wait.expected}
    rank = min(deviating or stuck)
    met: list[int] = []
    while rank not in met:
        met.append(rank)
        rank, _ = next(_links(stuck, rank))
    circle = met[met.index(rank) :]
    first = circle.index(min(deviating.keys() & set(circle), default=min(circle)))
    circle = circle[first:] + circle[:first]
    said = []
    for one in circle[:_MOST_LINKS]:
        other, what = next(_links(stuck, one))
        said.append(f"waits {what} rank {other}")
    left = f", and so on over {len(circle) - _MOST_LINKS} more ranks" if len(circle) > _MOST_LINKS else ""
    who = [f" Rank {one} leaves the order of the steps so far, which leads to '{to}'." for one, to in deviating.items()]
    leaves = "".join(who[:_MOST_LINKS])
    token, expected = agreement.tokens.last, next(iter(deviating.values()), "")
    return DivergenceError(
        f"ranks diverge: they wait for each other. Rank {circle[0]} {', which '.join(said)}{left}.{leaves} "
        f"{agreement.way_out(token, expected)}"
    )
