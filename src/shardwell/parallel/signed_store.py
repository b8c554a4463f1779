"""A store for messages between ranks, whose values are signed with the job's secret where there is one.

Any process that reaches torch's store can write to it. With a secret, values of other processes do not count: they are
treated as absent, and a rank that has a message overwrites them. Without a secret, the store is used as it is.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Sequence
from typing import Any

from shardwell.secret import derived, job_secret

_log = logging.getLogger("shardwell")
_CODE = 16  # bytes; twice as many characters
_MOST_TRIES = 100  # to overwrite values that another process keeps writing


def signed_where_secret(store: Any, prefix: str, rank: int) -> Any:
    """Return `store`, or a `SignedStore` around it if the environment has a secret."""
    secret = job_secret()
    _compare(store, secret, rank)
    if secret is None:
        return store
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return SignedStore(store, derived(secret, f"ranks {run}"), prefix, rank)


def _compare(store: Any, secret: bytes | None, rank: int) -> None:
    """Warn if ranks have different secrets: no rank would accept the values of the others.

    This comparison is not signed, so other processes could falsify it.
    """
    mark = "none" if secret is None else derived(secret, "mark")[:8].hex()
    first = bytes(store.compare_set("signed by", "", mark)).decode(errors="replace")
    if first != mark:
        _log.warning(
            "rank %d has %s, and the rank that came first %s: they will not hear each other. Give all ranks the same "
            "SHARDWELL_SECRET, or none",
            rank,
            "no secret" if secret is None else "a secret",
            "has none" if first == "none" else "has another",
        )


class SignedStore:
    """A torch store in which only values count that were signed for the same job and name."""

    def __init__(self, store: Any, key: bytes, prefix: str, rank: int) -> None:
        self._store, self._key, self._prefix, self._rank = store, key, prefix, rank
        self._added: dict[str, int] = {}  # how often this rank added to a counter
        self._last = "", b""  # the name and the value that were read last

    def clone(self) -> SignedStore:
        """Return the same store with a connection of its own."""
        other = self._store.clone() if hasattr(self._store, "clone") else self._store
        return SignedStore(other, self._key, self._prefix, self._rank)

    def set(self, name: str, value: str) -> None:
        """Write a signed value."""
        self._store.set(name, self._signed(name, value.encode()))

    def get(self, name: str) -> bytes:
        """Wait until there is a value, and return it, or what it was when it was last read, if it is not signed now."""
        found = self._opened(name, self._store.get(name))
        return found if found is not None else self._last[1] if self._last[0] == name else b""

    def check(self, names: Sequence[str]) -> bool:
        """Return whether all of the names have values that this job signed."""
        if not self._store.check(list(names)):
            return False
        return all(self._opened(name, self._store.get(name)) is not None for name in names)

    def compare_set(self, name: str, expected: str, value: str) -> bytes:
        """Write `value` where there is no value of this job; return the value that is there then.

        `expected` must be empty.
        """
        if expected:
            raise ValueError("only a missing value can be replaced")
        signed = self._signed(name, value.encode())
        there = self._store.compare_set(name, "", signed)
        for _ in range(_MOST_TRIES):
            if (found := self._opened(name, there)) is not None:
                return found
            self._store.set(name, "")  # torch compares text, and the foreign value may not be text
            there = self._store.compare_set(name, "", signed)
        raise RuntimeError(f"another program keeps writing to '{name}' in the store, without this job's secret")

    def add(self, name: str, number: int) -> int:
        """Add to a counter and return its value: the number of signed entries, one for each rank and each time.

        Torch's own counters are numbers that any process can change. A file store has nothing else; the mode of the
        file says which users may write to it.
        """
        if not self._store.has_extended_api():
            return int(self._store.add(name, number))
        for _ in range(number):
            self._added[name] = self._added.get(name, 0) + 1
            word = f"{self._rank}.{self._added[name]}"
            self._store.append(name, f"|{word} {self._code(name, word.encode())}|")
        if not number and not self._store.check([name]):
            return 0
        words = (part.partition(b" ")[::2] for part in self._store.get(name).split(b"|"))
        return len({word for word, code in words if hmac.compare_digest(code, self._code(name, word).encode())})

    def delete_key(self, name: str) -> bool:
        return bool(self._store.delete_key(name))

    def _signed(self, name: str, value: bytes) -> str:
        """Return the signature followed by the value, as text, because torch takes text."""
        return self._code(name, value) + value.decode()

    def _opened(self, name: str, found: bytes) -> bytes | None:
        """Return the value that was signed; None if it was not signed by this job, under this name."""
        code, value = bytes(found[: 2 * _CODE]), bytes(found[2 * _CODE :])
        if not hmac.compare_digest(code, self._code(name, value).encode()):
            return None
        self._last = name, value
        return value

    def _code(self, name: str, value: bytes) -> str:
        """Return the signature of a value under a name."""
        named = f"{self._prefix}\0{name}\0".encode() + value
        return hmac.digest(self._key, named, "sha256")[:_CODE].hex()
