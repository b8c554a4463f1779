"""Notes for the user about a configuration without problems."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """A sentence; it hurts if a user who does not read it may train other numbers than expected."""

    text: str
    hurts: bool = False
    is_own: bool = False  # about a key of shardwell's own, which says nothing about DeepSpeed
    unused: tuple[str, str] | None = None  # a key without effect and the reason; these share one sentence
