"""A comparison of what the ranks are about to train, before they train it. The error names the rank that differs.

It all-gathers one digest per rank; only if the digests differ, the data behind them is exchanged through the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from shardwell.errors import DivergenceError, PeerError
from shardwell.parallel.collectives import Collectives
from shardwell.parallel.rank_store import Pause, arrive, has_all

_SIZE = 16  # bytes of a digest
_TIMEOUT = 10.0  # seconds to wait for the messages of other ranks, which all know that they have to send them
_MOST_RANKS = 8  # in a list
_MOST_LETTERS = 200  # of a value

Section = Mapping[str, str]  # what is compared, in order of importance -> its value on this rank


def check_alike(world: Collectives, where: str, sections: Mapping[str, Section]) -> None:
    """Raise on all ranks if one of them differs, with the first difference; all ranks must call this."""
    agreement = world.agreement
    if agreement is None or agreement.store is None:
        return
    own = {name: _digest(section) for name, section in sections.items()}
    rows = world.tell_all(_digest(own), f"COMPARE {where}")
    if len(set(rows)) == 1:
        return
    usual = Counter(rows).most_common(1)[0][0]  # the most frequent digest; of equally frequent ones, the first rank's
    odd = next(row for row in rows if row != usual)
    talk = _Exchange(world, f"sameness/{rows[0].hex()}/{odd.hex()}", (rows.index(usual), rows.index(odd)))
    digests = talk.swap("sections", {name: digest.hex() for name, digest in own.items()})
    section = _first_difference(*digests)
    words = "other code: they compare other things"
    if section in sections:
        words = _difference(section, *talk.swap("words", dict(sections[section])), rows, usual, odd)
    talk.end()
    raise agreement.fail(DivergenceError(f"ranks differ in {where}: {words}. All ranks must train the same thing."))


class _Exchange:
    """An exchange through the store: two ranks tell all others, and every rank reads it before any rank leaves."""

    def __init__(self, world: Collectives, prefix: str, speakers: tuple[int, int]) -> None:
        assert world.agreement is not None
        self._rank, self._size, self._store = world.rank_group.rank, world.rank_group.size, world.agreement.store
        self._prefix, self._speakers = prefix, speakers

    def swap(self, what: str, mine: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the data of the two ranks, on all ranks."""
        if self._rank in self._speakers:
            self._store.set(f"{self._prefix}/{what}/{self._rank}", json.dumps(mine))
        first, second = (self._receive(f"{self._prefix}/{what}/{rank}", rank) for rank in self._speakers)
        return first, second

    def _receive(self, key: str, rank: int) -> Any:
        """Wait for a rank's message in the store and return it."""
        deadline, pause = time.monotonic() + _TIMEOUT, Pause(self._size)
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise PeerError(f"rank {rank} trains something else, and did not say what within {_TIMEOUT:g} s")
            pause()
        return json.loads(self._store.get(key))

    def end(self) -> None:
        """Wait until all ranks have read: the store may end with the first rank that leaves."""
        with contextlib.suppress(RuntimeError):
            arrive(self._store, key := f"{self._prefix}/heard", self._rank, self._size)
            deadline, pause = time.monotonic() + _TIMEOUT, Pause(self._size)
            while not has_all(self._store, key) and time.monotonic() < deadline:
                pause()


def _digest(section: Mapping[str, str | bytes]) -> bytes:
    """Return a digest of a section. It depends on the order too, because what ranks do follows it."""
    text = json.dumps([[key, value if isinstance(value, str) else value.hex()] for key, value in section.items()])
    return hashlib.blake2b(text.encode(), digest_size=_SIZE).digest()


def _first_difference(usual: Mapping[str, str], odd: Mapping[str, str]) -> str:
    """Return the first key that differs; an empty string if only the order does."""
    keys = [*usual, *(key for key in odd if key not in usual)]
    return next((key for key in keys if usual.get(key) != odd.get(key)), "")


def _difference(
    section: str, usual: Mapping[str, str], odd: Mapping[str, str], rows: list[bytes], most: bytes, other: bytes
) -> str:
    """Return a sentence that says which ranks have which values."""
    those = _ranks([rank for rank, row in enumerate(rows) if row == other])
    rest = _ranks([rank for rank, row in enumerate(rows) if row == most])
    key = _first_difference(usual, odd)
    if not key:
        place, (one, two) = next((n, pair) for n, pair in enumerate(zip(odd, usual, strict=True)) if pair[0] != pair[1])
        return f"{section} number {place} is {one} on {those} and {two} on {rest}"
    found = f"{section} {key} is {_shown(odd.get(key))} on {those} and {_shown(usual.get(key))} on {rest}"
    more = sum(usual.get(name) != odd.get(name) for name in {**usual, **odd}) - 1
    return f"{found}, and {more} more differ{'s' if more == 1 else ''}" if more else found


def _shown(value: str | None) -> str:
    if value is None:
        return "not there"
    return value if len(value) <= _MOST_LETTERS else f"{value[:_MOST_LETTERS]}..."


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"
