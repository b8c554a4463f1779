"""Log messages about ranks that others wait for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwell.parallel.heartbeat import Heartbeat

_MOST_NAMES = 3


class WaitReports:
    """Log messages about slow ranks, with growing intervals between them."""

    def __init__(self, first: float) -> None:
        self._next = first

    def __call__(self, waited: float, signs: Mapping[int, Heartbeat], token: str) -> None:
        if waited >= self._next:
            self._next = 2 * waited
            logging.getLogger("shardwell").warning("'%s' is waiting for %s", token, listed(signs))


def listed(signs: Mapping[int, Heartbeat]) -> str:
    """Return the ranks and what they do, as a part of a sentence."""
    said = "; ".join(f"rank {rank}, which is {sign}" for rank, sign in list(signs.items())[:_MOST_NAMES])
    return said if len(signs) <= _MOST_NAMES else f"{said}; and {len(signs) - _MOST_NAMES} more ranks"
