"""Pictures of a timeline: a page that needs nothing else, in light and dark, and a PNG."""

from __future__ import annotations

from html import escape
from pathlib import Path

from shardwell.monitor.numbers import milliseconds
from shardwell.monitor.timeline import ROWS, Span, Timeline, sizes

_COLOURS = {
    "compute": "#4c72b0",
    "wait": "#c44e52",
    "all-gather": "#dd8452",
    "reduce-scatter": "#8172b3",
    "copy up": "#64b5cd",
    "copy down": "#937860",
    "host update": "#55a868",
    "disk": "#8c8c8c",
}
_PHASES = {"forward": 1.0, "backward": 0.75, "step": 0.5, "other": 0.25}  # opacity of spans of the row compute
_WIDTH, _HEIGHT, _LEFT, _TOP = 1200, 34, 120, 24
_LEAST = 0.0004  # share of the width below which neighbours are drawn as one
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --line: #d0d0d0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #161616; --line: #444444; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 1rem; }
.picture { overflow-x: auto; } svg { min-width: 640px; width: 100%; height: auto; }
text { fill: var(--ink); font: 13px system-ui, sans-serif; } line { stroke: var(--line); }
table { border-collapse: collapse; } td, th { padding: .2rem .7rem; border-bottom: 1px solid var(--line); }
td:not(:first-child), th:not(:first-child) { text-align: right; }
"""


def page(timeline: Timeline) -> str:
    """Return one HTML page: the picture, the largest parts of a step in words, and a table of rows."""
    title = escape(timeline.title or "timeline")
    reasons = "".join(f"<li>{escape(text)}</li>" for text in timeline.reasons())
    notes = "".join(f"<p>{escape(note)}</p>" for note in timeline.notes)
    rows = "".join(_table_row(timeline, row) for row in ROWS if timeline.of(row))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>Rank {timeline.rank}, {timeline.steps} step(s), "
        f"{milliseconds(timeline.seconds / timeline.steps)} each. Hold the pointer over a span for its name.</p>"
        f'<div class="picture">{picture(timeline)}</div><h2>The largest parts of a step</h2><ol>{reasons}</ol>{notes}'
        "<h2>Rows</h2><table><tr><th>row</th><th>spans</th><th>busy a step</th><th>share</th><th>bytes</th></tr>"
        f"{rows}</table></body></html>\n"
    )


def _table_row(timeline: Timeline, row: str) -> str:
    spans, busy = timeline.of(row), timeline.busy(row)
    cells = (row, str(len(spans)), milliseconds(busy / timeline.steps), f"{busy / timeline.seconds:.1%}", sizes(spans))
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


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
        for span in _drawn(timeline, row):
            opacity = _PHASES.get(span.name.split(" ")[0], 1.0) if row == "compute" else 0.85
            width = max(scale * span.seconds, 0.5)
            parts.append(
                f'<rect x="{_LEFT + scale * span.begin:.1f}" y="{top + 4}" width="{width:.1f}" height="{_HEIGHT - 8}" '
                f'fill="{_COLOURS[row]}" opacity="{opacity}"><title>{escape(span.name)}, '
                f"{milliseconds(span.seconds)}</title></rect>"
            )
    return "".join(parts) + "</svg>"


def _drawn(timeline: Timeline, row: str) -> list[Span]:
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

    rows = [row for row in ROWS if timeline.of(row)]
    figure = Figure(figsize=(11, 0.5 * len(rows) + 1.2), dpi=150)
    FigureCanvasAgg(figure)
    panel = figure.add_subplot()
    for place, row in enumerate(reversed(rows)):
        for span in _drawn(timeline, row):
            alpha = _PHASES.get(span.name.split(" ")[0], 1.0) if row == "compute" else 0.85
            panel.broken_barh(
                [(1e3 * span.begin, 1e3 * span.seconds)], (place - 0.4, 0.8), facecolors=_COLOURS[row], alpha=alpha
            )
    labels = [f"{row} {timeline.busy(row) / timeline.seconds:.0%}" for row in reversed(rows)]
    panel.set_yticks(range(len(rows)), labels)
    panel.set_xlim(0, 1e3 * timeline.seconds)
    panel.set_xlabel("ms")
    panel.set_title(timeline.title or "timeline", loc="left", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    return path
