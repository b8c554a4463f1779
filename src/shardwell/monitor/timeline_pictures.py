"""Pictures of a timeline: SVG for notebooks, and a PNG."""

from __future__ import annotations

from html import escape
from pathlib import Path

from shardwell.monitor.numbers import milliseconds
from shardwell.monitor.timeline import ROWS, Span, Timeline

COLOURS = {
    "compute": "#4c72b0",
    "wait": "#c44e52",
    "all-gather": "#dd8452",
    "reduce-scatter": "#8172b3",
    "copy up": "#64b5cd",
    "copy down": "#937860",
    "host update": "#55a868",
    "disk": "#8c8c8c",
}
PHASES = {"forward": 1.0, "backward": 0.75, "step": 0.6, "other": 0.4}  # opacity of spans of the row compute
_WIDTH, _HEIGHT, _LEFT, _TOP = 1200, 34, 120, 24
_LEAST = 0.0004  # share of the width below which neighbours are drawn as one


def picture(timeline: Timeline) -> str:
    """Return the timeline as SVG."""
    rows = [row for row in ROWS if timeline.of(row)]
    height = _TOP + _HEIGHT * len(rows) + 8
    scale = (_WIDTH - _LEFT - 10) / timeline.seconds
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline of a step">']
    for tick in range(11):
        at = _LEFT + scale * timeline.seconds * tick / 10
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 4}" y2="{height}" stroke="#888" opacity="0.3"/>')
        if tick % 2 == 0:
            text = milliseconds(timeline.seconds * tick / 10)
            parts.append(f'<text x="{at:.1f}" y="14" text-anchor="middle">{text}</text>')
    for number, row in enumerate(rows):
        top = _TOP + number * _HEIGHT
        parts.append(f'<text x="0" y="{top + 21}">{row}</text>')
        for span in drawn(timeline, row):
            width = max(scale * span.seconds, 0.5)
            parts.append(
                f'<rect x="{_LEFT + scale * span.begin:.1f}" y="{top + 4}" width="{width:.1f}" height="{_HEIGHT - 8}" '
                f'fill="{COLOURS[row]}" opacity="{opacity(span)}"><title>{escape(span.name)}, '
                f"{milliseconds(span.seconds)}</title></rect>"
            )
    return "".join(parts) + "</svg>"


def opacity(span: Span) -> float:
    """Return how strongly a span is painted: what computes is told apart by its phase."""
    return PHASES.get(span.name.split(" ")[0], 1.0) if span.row == "compute" else 0.85


def drawn(timeline: Timeline, row: str) -> list[Span]:
    """Return the spans of a row, neighbours of the same name joined, and tiny gaps closed."""
    found: list[Span] = []
    for span in timeline.of(row):
        last = found[-1] if found else None
        if last is not None and last.name == span.name and span.begin - last.end < _LEAST * timeline.seconds:
            found[-1] = Span(row, last.name, last.begin, max(last.end, span.end), last.num_bytes + span.num_bytes)
        else:
            found.append(span)
    return found


def draw(timeline: Timeline, path: Path) -> Path:
    """Write the timeline as PNG; it needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [row for row in ROWS if timeline.of(row)]
    figure = Figure(figsize=(11, 0.5 * len(rows) + 1.2), dpi=150)
    FigureCanvasAgg(figure)
    panel = figure.add_subplot()
    for place, row in enumerate(reversed(rows)):
        for span in drawn(timeline, row):
            panel.broken_barh(
                [(1e3 * span.begin, 1e3 * span.seconds)], (place - 0.4, 0.8), facecolors=COLOURS[row],
                alpha=opacity(span), edgecolors="white", linewidth=0.4,
            )  # fmt: skip
    labels = [f"{row} {timeline.busy(row) / timeline.seconds:.0%}" for row in reversed(rows)]
    panel.set_yticks(range(len(rows)), labels)
    panel.set_xlim(0, 1e3 * timeline.seconds)
    panel.set_xlabel("ms")
    panel.set_title(
        f"{timeline.title or 'timeline'}: {milliseconds(timeline.seconds / timeline.steps)} a step",
        loc="left",
        fontsize=10,
    )
    panel.spines[["top", "right"]].set_visible(False)
    key = [Patch(facecolor=COLOURS["compute"], alpha=share, label=phase) for phase, share in PHASES.items()]
    panel.legend(handles=key, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(key), frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    return path
