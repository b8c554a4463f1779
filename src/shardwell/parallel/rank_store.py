"""The store in which ranks leave messages for each other, with errors that say why it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwell.errors import ShardwellError


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

    def first(self, key: str, words: str) -> str:
        """Return the value that the first rank has written: `words`, if there was none before."""
        return str(self._ask(self._store.compare_set, key, "", words).decode())

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError as error:
            raise self._explain(error) from error
