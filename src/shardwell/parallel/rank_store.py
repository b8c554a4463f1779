"""The store in which ranks leave messages for each other, with errors that say why it ended.

One process holds the store and serves all ranks, so what a rank asks of it must not grow with their number: ranks are
counted in groups, one rank looks at all others for the rest of them, and ranks that wait ask less often if there are
many.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shardwell.errors import ShardwellError
from shardwell.parallel.signal_errors import is_from_signal

_GROUP = 128  # ranks that are counted together; counters with signatures are lists of that length
_RANKS_PER_SECOND = 2048  # that may ask the store: each asks it about three things, and it answers 60,000 a second
_SHARE, _SHORTEST, _LONGEST = 0.2, 1e-4, 0.05  # of the time waited so far; seconds
ALL = "all"  # under it the last rank that arrives lets the others go on


def arrive(store: Any, key: str, index: int, size: int) -> bool:
    """Count one of `size` ranks; return whether it is the last one, and let those in `wait_for_all` go on then.

    The last rank of each group is counted in a group of groups, and so on.
    """
    level = 0
    while True:
        group = index // _GROUP
        if store.add(f"{key}/{level}/{group}", 1) < min(_GROUP, size - group * _GROUP):
            return False
        if size <= _GROUP:
            store.set(f"{key}/{ALL}", "")
            return True
        index, size, level = group, -(-size // _GROUP), level + 1


def forget_arrival(store: Any, key: str, index: int, size: int) -> None:
    """Remove the counters of the groups that `index` is the first rank of; every rank has seen them."""
    level = 0
    while index % _GROUP == 0:
        store.delete_key(f"{key}/{level}/{index // _GROUP}")
        if size <= _GROUP:
            store.delete_key(f"{key}/{ALL}")
            return
        index, size, level = index // _GROUP, -(-size // _GROUP), level + 1


def has_all(store: Any, key: str) -> bool:
    """Return whether all ranks have arrived."""
    return bool(store.check([f"{key}/{ALL}"]))


class Pause:
    """The pauses of a rank between two questions to the store: a part of its wait so far, up to a limit.

    The limit grows with the number of ranks, so that one store can serve them all while they wait. (A wait inside the
    store would need no questions, but torch prints two lines whenever one ends without a value, and no signal reaches
    Python meanwhile.)
    """

    def __init__(self, size: int) -> None:
        self._longest = between(_LONGEST, size)
        self._begin = time.monotonic()

    def __call__(self) -> None:
        time.sleep(min(max(_SHARE * (time.monotonic() - self._begin), _SHORTEST), self._longest))


def between(seconds: float, size: int) -> float:
    """Return how long each of `size` ranks waits between two questions, so that one store can serve them all."""
    return max(seconds, size / _RANKS_PER_SECOND)


class RankStore:
    """A torch store whose errors, raised when the process that holds it is gone, are replaced by those of `explain`."""

    def __init__(self, store: Any, explain: Callable[[Exception], ShardwellError]) -> None:
        self._store, self._explain = store, explain

    def set(self, key: str, words: str) -> None:
        self._ask(self._store.set, key, words)

    def get(self, key: str) -> str:
        """Wait until there is a value, and return it."""
        return str(self._ask(self._store.get, key).decode())

    def has(self, key: str) -> bool:
        """Return whether there is a value."""
        return bool(self._ask(self._store.check, [key]))

    def add(self, key: str, number: int) -> int:
        """Add to a counter and return its new value."""
        return int(self._ask(self._store.add, key, number))

    def arrive(self, key: str, index: int, size: int) -> bool:
        """Count one of `size` ranks; return whether it is the last one."""
        return bool(self._ask(arrive, self._store, key, index, size))

    def has_all(self, key: str) -> bool:
        """Return whether all ranks have arrived."""
        return bool(self._ask(has_all, self._store, key))

    def first(self, key: str, words: str) -> str:
        """Return the value that the first rank has written: `words`, if there was none before."""
        return str(self._ask(self._store.compare_set, key, "", words).decode())

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError as error:
            if is_from_signal(error):
                raise
            raise self._explain(error) from error
