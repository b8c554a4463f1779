"""A timeline as one HTML page that loads nothing: in light and dark, for wide and narrow screens, pointers and keys."""

from __future__ import annotations

from html import escape

from shardwell.monitor.numbers import milliseconds
from shardwell.monitor.timeline import ROWS, Timeline, sizes
from shardwell.monitor.timeline_pictures import COLOURS, PHASES, drawn, opacity

_ROW = 30  # pixels
_WIDTH = 10_000  # of the picture, in its own units: it is stretched to the width of the screen
_TICKS = 4
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"  # nothing is loaded, by contract
STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --soft: #5c5c5c; --paper: #fff; --line: #d5d5d5; --mark: #000; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --soft: #a8a8a8; --paper: #16181b; --line: #3c4045; --mark: #fff; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 1rem;
  max-width: 80rem; }
h1 { font-size: 1.35rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; } p { margin: .3rem 0; }
.chart { display: flex; margin-top: .8rem; } .labels { flex: none; padding: 1.6rem .7rem 0 0; font-size: 13px; }
.labels div { height: 30px; line-height: 30px; white-space: nowrap; }
.scroll { flex: 1; min-width: 0; overflow-x: auto; } .scroll:focus-visible { outline: 2px solid #4c8bf5; }
.plot { position: relative; min-width: 100%; } .ticks { height: 1.6rem; position: relative; font-size: 12px; }
.ticks span { position: absolute; transform: translateX(-50%); white-space: nowrap; color: var(--soft); }
.ticks span:first-child { transform: none; } .ticks span:last-child { transform: translateX(-100%); }
svg { display: block; width: 100%; } rect { cursor: pointer; }
line { stroke: var(--line); vector-effect: non-scaling-stroke; }
.chosen { stroke: var(--mark); stroke-width: 2px; vector-effect: non-scaling-stroke; opacity: 1; }
.bar { display: flex; gap: .5rem; align-items: center; min-height: 3.2rem; flex-wrap: wrap; }
.bar output { flex: 1 1 14rem; font-variant-numeric: tabular-nums; }
button { font: inherit; color: inherit; background: none; border: 1px solid var(--line); border-radius: 6px;
  min-width: 2.6rem; min-height: 2.6rem; cursor: pointer; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: 13px; color: var(--soft); }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; vertical-align: -1px; }
.table { overflow-x: auto; } table { border-collapse: collapse; } li { margin: .2rem 0; } ol { padding-left: 1.4rem; }
td, th { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
@media (max-width: 40rem) {
  .ticks span:nth-child(even) { display: none; } .labels { font-size: 12px; padding-right: .4rem; }
  table { font-size: 12.5px; width: 100%; } td, th { padding-right: .3rem; }
  th { white-space: normal; vertical-align: bottom; } }
"""
SCRIPT = """
const scroll = document.querySelector('.scroll'), plot = document.querySelector('.plot');
const said = document.querySelector('output'), first = said.textContent;
const rows = [...document.querySelectorAll('svg g')].map(row => [...row.children]);
let chosen = null, held = null, zoom = 1;
function show(span) { said.textContent = span ? span.firstChild.textContent : first; }
function choose(span) {
  if (chosen) chosen.classList.remove('chosen');
  chosen = span;
  if (!span) return show(null);
  span.classList.add('chosen'); show(span);
  const box = span.getBoundingClientRect(), view = scroll.getBoundingClientRect();
  if (box.left < view.left || box.right > view.right) scroll.scrollLeft += box.left - view.left - view.width / 3;
}
function middle(span) { return Number(span.dataset.middle); }
function grow(factor) {
  const at = (scroll.scrollLeft + scroll.clientWidth / 2) / plot.clientWidth;
  zoom = Math.min(64, Math.max(1, zoom * factor)); plot.style.width = 100 * zoom + '%';
  scroll.scrollLeft = at * plot.clientWidth - scroll.clientWidth / 2;
}
scroll.addEventListener('pointerover', event => { if (event.target.tagName === 'rect') show(event.target); });
scroll.addEventListener('pointerleave', () => show(chosen));
scroll.addEventListener('click', event => choose(event.target.tagName === 'rect' ? event.target : null));
scroll.addEventListener('keydown', event => {
  const row = chosen ? rows.findIndex(spans => spans.includes(chosen)) : 0;
  const place = chosen ? rows[row].indexOf(chosen) : -1;
  const near = other => rows[other].reduce((a, b) =>
    Math.abs(middle(b) - middle(chosen)) < Math.abs(middle(a) - middle(chosen)) ? b : a);
  if (event.key === 'ArrowRight') choose(rows[row][Math.min(place + 1, rows[row].length - 1)]);
  else if (event.key === 'ArrowLeft') choose(rows[row][Math.max(place - 1, 0)]);
  else if (event.key === 'ArrowDown' && chosen && row + 1 < rows.length) choose(near(row + 1));
  else if (event.key === 'ArrowUp' && chosen && row > 0) choose(near(row - 1));
  else if (event.key === 'Escape') choose(null);
  else if (event.key === '+' || event.key === '=') grow(2);
  else if (event.key === '-') grow(0.5);
  else return;
  event.preventDefault();
});
document.querySelector('#closer').addEventListener('click', () => grow(2));
document.querySelector('#wider').addEventListener('click', () => grow(0.5));
"""


def page(timeline: Timeline) -> str:
    """Return the page: the picture, the largest parts of a step in words, and a table of rows."""
    title = escape(timeline.title or "timeline")
    reasons = "".join(f"<li>{escape(text)}</li>" for text in timeline.reasons())
    notes = "".join(f"<p>{escape(note)}</p>" for note in timeline.notes)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>{milliseconds(timeline.seconds / timeline.steps)} a step</p>{chart(timeline)}"
        f"<h2>The largest parts of a step</h2><ol>{reasons}</ol>{notes}<h2>Rows</h2>{_table(timeline)}"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def chart(timeline: Timeline) -> str:
    """Return the picture, which needs `STYLE` and `SCRIPT`."""
    rows = [row for row in ROWS if timeline.of(row)]
    labels = "".join(f"<div>{row}</div>" for row in rows)
    ticks = "".join(
        f'<span style="left:{100 * tick / _TICKS:g}%">{milliseconds(timeline.seconds * tick / _TICKS)}</span>'
        for tick in range(_TICKS + 1)
    )
    lines = "".join(
        f'<line x1="{_WIDTH * tick // _TICKS}" x2="{_WIDTH * tick // _TICKS}" y1="0" y2="{_ROW * len(rows)}"/>'
        for tick in range(_TICKS + 1)
    )
    spans = "".join(f"<g>{_spans(timeline, row, _ROW * place)}</g>" for place, row in enumerate(rows))
    colour = COLOURS["compute"]
    key = "".join(f'<span><i style="background:{colour};opacity:{PHASES[one]}"></i>{one}</span>' for one in PHASES)
    return (
        f'<div class="chart"><div class="labels">{labels}</div><div class="scroll" tabindex="0" role="group" '
        f'aria-label="spans; arrow keys choose one, + and - zoom"><div class="plot"><div class="ticks">{ticks}</div>'
        f'<svg viewBox="0 0 {_WIDTH} {_ROW * len(rows)}" height="{_ROW * len(rows)}" preserveAspectRatio="none">{lines}'
        f'{spans}</svg></div></div></div><div class="bar"><output aria-live="polite">Point at a span or tap it; arrow '
        'keys work, too.</output><button id="wider" aria-label="zoom out">−</button>'
        '<button id="closer" aria-label="zoom in">+'
        f'</button></div><div class="key">compute: {key}</div>'
    )


def _spans(timeline: Timeline, row: str, top: int) -> str:
    """Return the spans of a row; the title of each is what the page says about it."""
    scale, parts = _WIDTH / timeline.seconds, []
    for span in drawn(timeline, row):
        begin, width = scale * span.begin, max(scale * span.seconds, 2.0)
        size = f", {sizes([span])}" if span.num_bytes else ""
        parts.append(
            f'<rect x="{begin:.1f}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}" fill="{COLOURS[row]}" '
            f'opacity="{opacity(span)}" data-middle="{begin + width / 2:.0f}"><title>{escape(span.name)}: '
            f"{milliseconds(span.seconds)}{size}, from {milliseconds(span.begin)} on</title></rect>"
        )
    return "".join(parts)


def _table(timeline: Timeline) -> str:
    found = ["<tr><th>row</th><th>spans</th><th>busy a step</th><th>share</th><th>bytes</th></tr>"]
    for row in (row for row in ROWS if timeline.of(row)):
        spans, busy = timeline.of(row), timeline.busy(row)
        share = f"{busy / timeline.seconds:.1%}"
        cells = (row, str(len(spans)), milliseconds(busy / timeline.steps), share, sizes(spans))
        found.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f'<div class="table"><table>{"".join(found)}</table></div>'
