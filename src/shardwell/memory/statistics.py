"""Reports of allocated bytes, by state, unit and tier: what `engine.memory()` returns, and how it is rendered."""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table


class Tier(enum.Enum):
    """The memory that bytes are stored in, from the device down."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere

    @property
    def words(self) -> str:
        """The tier in a sentence: "2 GB on the host"."""
        return "on disk" if self is Tier.DISK else f"on the {self.value}"

    @property
    def offload_device(self) -> str:
        """The name of the tier as `device` of an offload block."""
        return _OFFLOAD_DEVICES[self]


_OFFLOAD_DEVICES = {Tier.DEVICE: "none", Tier.HOST: "cpu", Tier.DISK: "nvme"}
TIERS_BY_NAME = {name: tier for tier, name in _OFFLOAD_DEVICES.items()}  # as offload blocks name them


class StateKind(enum.Enum):
    """The purpose of allocated bytes."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    STAGING = "staging"

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere


Entry = tuple[StateKind, str, Tier]


class PrintsAsTable:
    """A base of reports that print as a table: as text, in IPython, and as HTML in notebooks."""

    __slots__ = ()

    def table(self) -> Table:
        """Return a rich table of the report."""
        raise NotImplementedError

    def __str__(self) -> str:
        return render(self.table())

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """Print the table in IPython and Jupyter."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return as_html(self.table())


@dataclass(frozen=True)
class MemoryReport(PrintsAsTable):
    """Bytes on this rank, now and at the peak, by (state, unit, tier)."""

    now: dict[Entry, int]
    peak: dict[Entry, int]  # of each tier, all entries at the moment when their total was largest

    def total(self, state: StateKind | None = None, *, tier: Tier | None = None, at_peak: bool = False) -> int:
        """Return all bytes, or those of one state, of one tier, or of both.

        At the peak of all tiers: each tier has a peak of its own, which need not be at the same moment.
        """
        entries = self.peak if at_peak else self.now
        return sum(
            size
            for (kind, _, place), size in entries.items()
            if (state is None or kind is state) and (tier is None or place is tier)
        )

    def peaks(self) -> dict[Tier, int]:
        """Return the most bytes of each tier; they need not be from the same moment."""
        return {tier: self.total(tier=tier, at_peak=True) for tier in Tier}

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
        for tier in Tier:
            if self.total(tier=tier, at_peak=True):
                now, peak = self.total(tier=tier), self.total(tier=tier, at_peak=True)
                table.add_row("all", tier.value, human(now), human(peak))
        return table


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
    """Return a rich table as HTML, for notebooks."""
    from html import escape

    def row(cells: Iterable[object], tag: str) -> str:
        styles = (f' style="text-align:{column.justify}"' for column in table.columns)
        return "".join(f"<{tag}{style}>{escape(str(cell))}</{tag}>" for style, cell in zip(styles, cells, strict=True))

    head = row((column.header for column in table.columns), "th")
    rows = (f"<tr>{row(cells, 'td')}</tr>" for cells in zip(*(column.cells for column in table.columns), strict=True))
    caption = escape(str(table.title or ""))
    return f"<table><caption>{caption}</caption><tr>{head}</tr>{''.join(rows)}</table>"
