"""Statistics of allocated bytes, by state, unit and tier: the data behind `engine.memory()`.

Every large allocation of an engine is added when it is made and removed when it is freed. The code that allocates does
the counting; tests compare the statistics with an independent counter.
"""

from __future__ import annotations

import enum
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


class Tier(enum.Enum):
    """The memory that bytes are stored in."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere


class StateKind(enum.Enum):
    """The purpose of allocated bytes."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    STAGING = "staging"

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere


Entry = tuple[StateKind, str, Tier]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank, now and at the peak, by (state, unit, tier)."""

    now: dict[Entry, int]
    peak: dict[Entry, int]  # all entries at the moment when their total was largest

    def total(self, state: StateKind | None = None, *, at_peak: bool = False) -> int:
        """Return all bytes, or those of one state."""
        books = self.peak if at_peak else self.now
        return sum(size for (kind, _, _), size in books.items() if state is None or kind is state)

    def by_unit(self) -> dict[str, int]:
        """Return the current bytes of each unit."""
        sums: defaultdict[str, int] = defaultdict(int)
        for (_, unit, _), size in self.now.items():
            sums[unit] += size
        return dict(sums)

    def table(self) -> Table:
        """Return a rich table of the bytes by state and tier."""
        from rich.table import Table

        table = Table(title="memory on this rank")
        for column in ("state", "tier", "now", "at peak"):
            table.add_column(column, justify="left" if column in ("state", "tier") else "right")
        for state, tier in sorted({(s, t) for s, _, t in {**self.now, **self.peak}}, key=lambda st: st[0].value):
            now, peak = (
                sum(n for (s, _, t), n in books.items() if (s, t) == (state, tier)) for books in (self.now, self.peak)
            )
            table.add_row(state.value, tier.value, human(now), human(peak))
        table.add_section()
        table.add_row("all", "", human(self.total()), human(self.total(at_peak=True)))
        return table

    def __str__(self) -> str:
        return render(self.table())

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """Print the table in IPython and Jupyter."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return as_html(self.table())


@dataclass
class MemoryStats:
    """The memory statistics of one engine."""

    _now: defaultdict[Entry, int] = field(default_factory=lambda: defaultdict(int))
    _peak: dict[Entry, int] = field(default_factory=dict)
    _total: int = 0
    _peak_total: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)  # worker threads free memory too

    def add(self, state: StateKind, unit: str, tier: Tier, size: int) -> None:
        """Count an allocation."""
        with self._lock:
            self._now[state, unit, tier] += size
            self._total += size
            if self._total > self._peak_total:
                self._peak_total = self._total
                self._peak = {}  # copied lazily, by the next decrease

    def remove(self, state: StateKind, unit: str, tier: Tier, size: int) -> None:
        """Count the freeing of an allocation."""
        with self._lock:
            self._write_down_peak()
            self._now[state, unit, tier] -= size
            self._total -= size
            assert self._now[state, unit, tier] >= 0, f"{unit} gave back more {state.value} than it held"

    def set(self, state: StateKind, unit: str, tier: Tier, size: int) -> None:
        """Set the size of an entry that is measured as a total, such as an optimizer's state."""
        with self._lock:
            held = self._now[state, unit, tier]
            if size > held:
                self.add(state, unit, tier, size - held)
            elif size < held:
                self.remove(state, unit, tier, held - size)

    def report(self) -> MemoryReport:
        """Return the current and the peak bytes."""
        with self._lock:
            self._write_down_peak()
            return MemoryReport({k: v for k, v in self._now.items() if v}, dict(self._peak))

    def _write_down_peak(self) -> None:
        """Copy the current entries to the peak, if they are the peak and were not copied yet."""
        if not self._peak and self._total == self._peak_total:
            self._peak = {entry: size for entry, size in self._now.items() if size}


def human(size: float) -> str:
    """Format a number of bytes: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def render(table: Table) -> str:
    """Return a rich table as plain text."""
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    Console(file=out, width=110, force_jupyter=False, force_terminal=False).print(table)
    return out.getvalue().rstrip("\n")


def as_html(table: Table) -> str:
    """Return a rich table for notebooks, as preformatted text."""
    from html import escape

    return f"<pre>{escape(render(table))}</pre>"
