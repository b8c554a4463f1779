"""What to tell the user of a configuration in which nothing is wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """A sentence, and whether a user who does not hear it may train other numbers than he thinks."""

    text: str
    hurts: bool = False
    unused: tuple[str, str] | None = None  # a key without effect, and why; many of them are told together
