"""A timeline of steps: what was computed, communicated, copied, updated and read when, and what was waited for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwell.memory.statistics import human
from shardwell.monitor.numbers import milliseconds

# Rows from top to bottom. A wait is time in which the training loop's own stream did nothing.
ROWS = ("compute", "wait", "all-gather", "reduce-scatter", "copy up", "copy down", "host update", "disk")
ROOT = "(root)"
_OTHER = "the script itself (data, logging) and what no hook reports"


@dataclass(frozen=True)
class Span:
    """One piece of work; times are seconds from the start of the timeline."""

    row: str
    name: str  # such as "forward blocks.3"
    begin: float
    end: float
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """The spans of some steps on one rank."""

    spans: tuple[Span, ...]
    seconds: float
    steps: int
    rank: int = 0
    title: str = ""
    notes: tuple[str, ...] = field(default=())

    def of(self, row: str) -> list[Span]:
        """Return the spans of a row, in the order in which they began."""
        return sorted((span for span in self.spans if span.row == row), key=lambda span: span.begin)

    def busy(self, row: str) -> float:
        """Return the seconds in which a row has at least one span."""
        total, upto = 0.0, 0.0
        for span in self.of(row):
            total += max(0.0, span.end - max(span.begin, upto))
            upto = max(upto, span.end)
        return total

    def reasons(self, most: int = 3) -> list[str]:
        """Return the largest reasons why the step is not shorter, in words."""
        by_cause: dict[str, list[Span]] = {}
        for span in self.of("wait"):
            by_cause.setdefault(span.name.partition(" of ")[0], []).append(span)
        lines: list[tuple[float, str]] = []
        for cause, spans in by_cause.items():
            seconds = sum(span.seconds for span in spans)
            worst = max(spans, key=lambda span: span.seconds)
            lines.append(
                (
                    seconds,
                    f"waits for {cause}: {milliseconds(seconds / self.steps)} a step ({seconds / self.seconds:.0%}), "
                    f"in {len(spans)} waits; the longest, {milliseconds(worst.seconds)}, is for {worst.name}",
                )
            )
        for phase in ("forward", "backward", "step", "other"):
            seconds = sum(span.seconds for span in self.of("compute") if span.name.startswith(phase))
            words = _OTHER if phase == "other" else f"{phase} computes"
            if seconds:
                lines.append(
                    (seconds, f"{words}: {milliseconds(seconds / self.steps)} a step ({seconds / self.seconds:.0%})")
                )
        return [text for _, text in sorted(lines, reverse=True)[:most]]

    def __str__(self) -> str:
        head = f"{self.title or 'timeline'}: {milliseconds(self.seconds / self.steps)} a step"
        rows = [f"  {row:15}{self.busy(row) / self.seconds:6.1%} of the time" for row in ROWS if self.of(row)]
        reasons = [f"  {number}. {text}" for number, text in enumerate(self.reasons(), start=1)]
        return "\n".join([head, *rows, "largest parts of a step:", *reasons, *(f"  {note}" for note in self.notes)])

    def chrome_trace(self) -> dict[str, Any]:
        """Return the timeline in the format of chrome://tracing and Perfetto."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
        ]
        for number, row in enumerate(ROWS):
            events.append({"ph": "M", "name": "thread_name", "pid": self.rank, "tid": number, "args": {"name": row}})
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.row,
                "pid": self.rank,
                "tid": ROWS.index(span.row),
                "ts": 1e6 * span.begin,
                "dur": 1e6 * span.seconds,
                "args": {"bytes": span.num_bytes} if span.num_bytes else {},
            }
            for span in self.spans
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, folder: str | Path, name: str = "timeline") -> list[Path]:
        """Write NAME.html, NAME.json (for Perfetto) and, where matplotlib is installed, NAME.png; return the files."""
        from shardwell.monitor.timeline_page import page
        from shardwell.monitor.timeline_pictures import draw

        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        files = [place / f"{name}.html", place / f"{name}.json"]
        files[0].write_text(page(self), encoding="utf-8")
        files[1].write_text(json.dumps(self.chrome_trace()), encoding="utf-8")
        try:
            files.append(draw(self, place / f"{name}.png"))
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
        return files

    def _repr_html_(self) -> str:
        from shardwell.monitor.timeline_pictures import picture

        return picture(self)


def sizes(spans: Iterable[Span]) -> str:
    """Return the bytes of some spans together, or nothing if none has bytes."""
    total = sum(span.num_bytes for span in spans)
    return human(total) if total else ""
