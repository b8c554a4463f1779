"""Reports of allocated bytes, by state, unit and tier: what `engine.memory()` returns, and how it is rendered."""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass
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
        entries = self.peak if at_peak else self.now
        return sum(size for (kind, _, _), size in entries.items() if state is None or kind is state)

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
                sum(n for (s, _, t), n in entries.items() if (s, t) == (state, tier))
                for entries in (self.now, self.peak)
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
