"""What a simulated step allocates, frees and receives, buffer by buffer: what forms are made from.

A report has totals and peaks. A form for other ranks, batches and sequences needs the sizes of single buffers, each of
which is one product; sums and peaks of them follow.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from shardwell.memory import StateKind, Tier

ACTIVATIONS = "activations"  # what is on the device beside the engine's own buffers


@dataclass(frozen=True)
class Change:
    """Bytes that were allocated, or freed if negative: by state and tier, and by the unit that they belong to."""

    state: str
    tier: Tier
    unit: str
    size: int
    becomes: str = ""  # the state of a tensor that an operation made, and that the engine counts from then on

    @property
    def part(self) -> str:
        """The state that the bytes are shown as."""
        return self.becomes or self.state


@dataclass
class Recording:
    """All changes since an engine was begun, and what the last simulated step did."""

    changes: list[Change] = field(default_factory=list)
    begin: int = 0  # the number of changes before the last step
    looks: list[int] = field(default_factory=list)  # numbers of changes after which the device may have its peak
    moments: list[tuple[str, int]] = field(default_factory=list)  # names, and the number of changes before each
    received: list[tuple[str, str, int]] = field(default_factory=list)  # kind, hop and bytes of each collective
    groups: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # of units: elements and parameters of each
    _activations: dict[int, int] = field(default_factory=dict)  # the change that made it, by the id of a living storage

    def begin_step(self) -> None:
        """Forget the step before."""
        self.begin = len(self.changes)
        self.looks, self.moments, self.received = [], [], []

    def begin_moment(self, name: str) -> None:
        """Note that a moment of the step begins."""
        self.moments.append((name, len(self.changes)))

    def changed(self, state: StateKind, unit: str, tier: Tier, size: int) -> None:
        """Note an allocation of the engine's, or the freeing of one."""
        if size:
            self.changes.append(Change(state.value, tier, unit, size))

    def entered(self, key: int, size: int) -> None:
        """Note an activation; the allocator will round its bytes up."""
        if size:
            self._activations[key] = len(self.changes)
            self.changes.append(Change(ACTIVATIONS, Tier.DEVICE, "", size))

    def counted(self, key: int, state: StateKind) -> None:
        """Note that an activation was of a state, which the engine counts from now on."""
        if key in self._activations:
            made = self._activations[key]
            self.changes[made] = replace(self.changes[made], becomes=state.value)

    def left(self, key: int) -> None:
        """Note that an activation is freed, or counted by the engine from now on."""
        made = self._activations.pop(key, None)
        if made is not None:
            self.changes.append(replace(self.changes[made], size=-self.changes[made].size))

    def look(self) -> None:
        """Note that the device may be at its peak now."""
        if not self.looks or self.looks[-1] != len(self.changes):
            self.looks.append(len(self.changes))


class ReceivedBytes(defaultdict[Any, int]):
    """Counters of traffic that tell a recording of each addition."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(int)
        self._recording = recording

    def __setitem__(self, key: Any, value: int) -> None:
        added = value - self.get(key, 0)
        if added > 0:
            kind, hop = key
            self._recording.received.append((kind.value, hop, added))
        super().__setitem__(key, value)
