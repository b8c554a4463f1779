"""Where ranks leave words for each other: a store whose end is told as what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwell.errors import ShardwellError


class RankStore:
    """A store of torch's. What it raises, because whoever holds it is gone, becomes what `explain` makes of it."""

    def __init__(self, store: Any, explain: Callable[[Exception], ShardwellError]) -> None:
        self._store, self._explain = store, explain

    def set(self, key: str, words: str) -> None:
        self._ask(self._store.set, key, words)

    def get(self, key: str) -> str:
        """What was written; waits until it is."""
        return str(self._ask(self._store.get, key).decode())

    def has(self, key: str) -> bool:
        return bool(self._ask(self._store.check, [key]))

    def add(self, key: str, number: int) -> int:
        return int(self._ask(self._store.add, key, number))

    def first(self, key: str, words: str) -> str:
        """What the first who came has written: these words, if nobody was there before."""
        return str(self._ask(self._store.compare_set, key, "", words).decode())

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError as error:
            raise self._explain(error) from error
