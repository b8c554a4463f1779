"""What a rank waits for, and what it has done that others may wait for: by these, circles of waits are found.

Each wait says which ranks must come how far in what: in the collectives of an agreement, at a meeting, in the messages
of a channel. A rank that has come so far is not waited for any more, even if its data is still on the way.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from shardwell.parallel.agreement import Agreement

_numbers = itertools.count(1)  # of the waits of this process


class Need(NamedTuple):
    """One need of a wait: that some ranks have come as far as `at` in `key`."""

    ranks: Sequence[int]  # without the rank that waits
    key: str
    at: float
    what: str  # words between "rank 0 waits" and "rank 1"


Needs = Sequence[Need]


@dataclass(frozen=True)
class Wait:
    """One wait of a rank."""

    needs: Needs
    expected: str = ""  # the token of the order so far, if the rank is about to leave that order
    number: int = field(default_factory=lambda: next(_numbers))
    begin: float = field(default_factory=time.monotonic)

    def written(self, engine: int) -> list[Any]:
        """Return the wait as JSON values. Keys are those of one engine of this process."""
        needs = [[_compact(one.ranks), f"{engine} {one.key}", one.at, one.what] for one in self.needs]
        return [self.number, self.expected, needs]

    @classmethod
    def read(cls, said: Sequence[Any]) -> Wait:
        """Return the wait that another rank wrote."""
        number, expected, needs = said
        return cls([Need(_spread(ranks), key, at, what) for ranks, key, at, what in needs], expected, number)


class Waits:
    """The waits of one engine on this rank, and the messages that it has begun to send and to receive."""

    def __init__(self) -> None:
        self.messages: dict[str, float] = {}  # by channel
        self.groups: list[weakref.ref[Agreement]] = []  # the agreements of some of the engine's ranks
        self._begun: list[Wait] = []  # each inside of the one before
        self._thread = threading.get_ident()

    @property
    def current(self) -> Wait | None:
        """Return the wait that this rank is in."""
        begun = self._begun[-1:]  # another thread may ask
        return begun[0] if begun else None

    def begin(self, needs: Needs, expected: str = "") -> Wait:
        """Say what this rank waits for. A wait in a thread beside the engine's says nothing of the rank."""
        wait = Wait(needs, expected)
        is_own = threading.get_ident() == self._thread
        if is_own or isinstance(threading.current_thread(), threading._DummyThread):  # autograd's are dummies
            self._begun.append(wait)
        return wait

    def end(self, wait: Wait) -> None:
        """Say that a wait that `begin` returned is over."""
        if wait in self._begun:
            self._begun.remove(wait)

    @contextlib.contextmanager
    def during(self, needs: Needs, expected: str = "") -> Iterator[None]:
        """Say what this rank waits for, inside."""
        wait = self.begin(needs, expected)
        try:
            yield
        finally:
            self.end(wait)


def _compact(ranks: Sequence[int]) -> dict[str, list[int]] | list[int]:
    """Return ranks as JSON values, without those of a regular row between its ends."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    if len(ranks) > 3 and step and list(ranks) == list(row := range(ranks[0], ranks[-1] + step, step)):
        return {"row": [row.start, row.stop, row.step]}
    return list(ranks)


def _spread(said: dict[str, list[int]] | list[int]) -> Sequence[int]:
    return range(*said["row"]) if isinstance(said, dict) else said
