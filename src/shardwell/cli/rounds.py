"""Rounds of a job, that is, which nodes run together: a state machine without sockets and clocks.

All nodes of a round run until one asks to join again, because its ranks failed or it is new. The others see that a node
waits, and ask, too. When no node is left in the round, the next one forms: immediately with the largest number of
nodes, and after some time with the smallest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

_GRACE = 10.0  # seconds in which the ranks of a node detect by themselves that another node is lost, and report why


class Node(Protocol):
    """A node that takes part while it is connected."""

    @property
    def order(self) -> tuple[object, ...]:
        """The node's position among the others."""


@dataclass(frozen=True)
class NodeRank:
    """A node's rank in a round."""

    round: int
    rank: int
    size: int


class Rounds:
    """The rounds of one job, from `least` to `most` nodes each."""

    def __init__(self, least: int, most: int, join_time: float) -> None:
        self._least, self._most, self._join_time = least, most, join_time
        self._number = 0
        self._seats: dict[Node, NodeRank] = {}  # of the round that runs
        self._waiting: list[Node] = []
        self._deadline: float | None = None  # of the round that forms
        self._lost_at: float | None = None  # when the first node of the round that runs was lost
        self.is_closed = False

    def join(self, node: Node) -> None:
        """Move `node` from this round to the next one."""
        self._seats.pop(node, None)
        if node not in self._waiting:
            self._waiting.append(node)

    def leave(self, node: Node, now: float) -> None:
        """Remove a node that has disconnected."""
        if self._seats.pop(node, None) is not None and self._lost_at is None:
            self._lost_at = now
        if node in self._waiting:
            self._waiting.remove(node)

    def rank_of(self, node: Node) -> NodeRank | None:
        return self._seats.get(node)

    def num_waiting(self, now: float) -> int:
        """Return the number of nodes for which running nodes should restart: those that wait, or one that is lost."""
        lost = int(self._lost_at is not None and now - self._lost_at > _GRACE)
        return len(self._waiting) + lost if len(self._seats) < self._most else 0

    def advance(self, now: float) -> int | None:
        """Form the next round if possible; return its number."""
        if self._seats or len(self._waiting) < self._least:
            self._deadline = None
            return None
        self._deadline = now + self._join_time if self._deadline is None else self._deadline
        if len(self._waiting) < self._most and now < self._deadline:
            return None
        chosen = sorted(self._waiting, key=lambda node: node.order)[: self._most]
        self._number += 1
        self._seats = {node: NodeRank(self._number, rank, len(chosen)) for rank, node in enumerate(chosen)}
        self._waiting = [node for node in self._waiting if node not in self._seats]
        self._deadline = self._lost_at = None
        return self._number
