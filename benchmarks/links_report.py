"""From points (a variant at a rate) to tables, crossings and a picture; nothing here measures anything."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

MB = 1e6
Point = dict[str, Any]


def rate_name(mbit: float | None) -> str:
    return "no limit" if mbit is None else f"{mbit:g} Mbit/s"


def chosen_words(chosen: Mapping[str, Any] | None) -> str:
    """What a variant has turned on, of what it may; nothing of one that does not choose."""
    if chosen is None:
        return ""
    on = [f"{key} {json.dumps(value)}" for key, value in chosen.items() if value is True or value > 1]
    return f" ({', '.join(on) or 'nothing turned on'})"


def by_variant(points: Sequence[Point]) -> dict[str, dict[float | None, Point]]:
    """The points of each variant by rate, slowest first."""
    found: dict[str, dict[float | None, Point]] = {}
    for point in sorted(points, key=lambda point: point["mbit"] or math.inf):
        found.setdefault(point["variant"], {})[point["mbit"]] = point
    return found


def floor(point: Point) -> float:
    """Seconds that the link alone needs for the bytes of a step; both directions run at once."""
    return float(max(point["there"], point["back"]) * 8e-6 / point["mbit"]) if point["mbit"] else 0.0


def crossings(points: Sequence[Point]) -> list[dict[str, Any]]:
    """For each two variants: which is faster on the slowest link, and the rates at which the other takes over.

    Rates between two measured ones are interpolated; a change after the last limit is told as that limit.
    """
    found = []
    for (first, ours), (second, theirs) in itertools.combinations(by_variant(points).items(), 2):
        rates = [mbit for mbit in ours if mbit in theirs]
        gaps = [math.log(ours[mbit]["seconds"] / theirs[mbit]["seconds"]) for mbit in rates]
        changes = []
        for (low, before), (high, after) in itertools.pairwise(zip(rates, gaps, strict=True)):
            if low is not None and (before < 0) != (after < 0):
                share = before / (before - after)
                changes.append(low if high is None else low * (high / low) ** share)
        if rates:
            faster, slower = (first, second) if gaps[0] < 0 else (second, first)
            found.append({"faster": faster, "slower": slower, "from": rates[0], "changes": changes})
    return found


def crossing_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for pair in found:
        changes = [f"{mbit:.0f} Mbit/s" for mbit in pair["changes"]]
        until = f"up to {changes[0]}" if changes else "at every rate"
        again = "".join(f", they change places again at {mbit}" for mbit in changes[1:])
        lines.append(f"{pair['faster']} is faster than {pair['slower']} {until}{again}")
    return lines


def seconds_table(points: Sequence[Point], title: str) -> Table:
    """Seconds a step of each variant at each rate, with what the link alone would need."""
    table = Table(title=title, title_justify="left", caption_justify="left", caption=CAPTION)
    variants = by_variant(points)
    rates = sorted({point["mbit"] for point in points}, key=lambda mbit: mbit or math.inf)
    table.add_column("link", no_wrap=True)
    for variant in variants:
        table.add_column(f"{variant} s/step", justify="right")
        table.add_column("link alone", justify="right")
    for mbit in rates:
        cells = []
        for found in variants.values():
            point = found.get(mbit)
            cells += ["-", "-"] if point is None else [f"{point['seconds']:.2f}", f"{floor(point):.2f}"]
        table.add_row(rate_name(mbit), *cells)
    return table


def bytes_table(points: Sequence[Point], warm: Mapping[str, Point]) -> Table:
    """Bytes a step over the link, by its counters (the most at any rate) and by the ledger; loss after the warm-up."""
    table = Table(title="over the link in a step, MB", title_justify="left")
    for heading in ("", "host 0 to 1", "1 to 0", "both", "ledger", "both / ledger", "loss"):
        table.add_column(heading, justify="right" if heading else "left")
    for variant, found in by_variant(points).items():
        point = _most(found)
        both, traffic_stats = point["there"] + point["back"], point["ledger"]
        books = ["-", "-"] if traffic_stats is None else [f"{traffic_stats / MB:.1f}", f"{both / traffic_stats:.4f}"]
        sizes = [f"{size / MB:.1f}" for size in (point["there"], point["back"], both)]
        table.add_row(variant, *sizes, *books, f"{warm[variant]['loss']:.4f}")
    return table


def _most(found: Mapping[float | None, Point]) -> Point:
    """The point with the most bytes."""
    return max(found.values(), key=lambda point: point["there"] + point["back"])


def draw(points: Sequence[Point], path: Path) -> str:
    """Step time over rate, and bytes by both counters; says where it lies, or why there is none."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), width_ratios=(3, 2))
    variants = by_variant(points)
    rates = sorted({point["mbit"] for point in points}, key=lambda mbit: mbit or math.inf)
    places = {mbit: place for place, mbit in enumerate(rates)}
    for number, (variant, found) in enumerate(variants.items()):
        at, colour = [places[mbit] for mbit in found], f"C{number}"
        left.plot(at, [point["seconds"] for point in found.values()], "o-", color=colour, label=variant)
        limited = [point for mbit, point in found.items() if mbit is not None]
        left.plot([places[p["mbit"]] for p in limited], [floor(p) for p in limited], ":", color=colour)
        most = _most(found)
        right.bar(number - 0.2, (most["there"] + most["back"]) / MB, 0.4, color=colour)
        right.bar(number + 0.2, (most["ledger"] or 0) / MB, 0.4, color=colour, alpha=0.5, hatch="//")
    left.set_yscale("log")
    left.set_xticks(range(len(rates)), ["no limit" if mbit is None else f"{mbit:g}" for mbit in rates])
    left.set_xlabel("link, Mbit/s in each direction (dotted: what the link alone needs)")
    left.set_ylabel("seconds a step")
    left.legend(fontsize=8)
    right.set_xticks(range(len(variants)), list(variants), rotation=30, ha="right")
    right.set_ylabel("MB a step over the link (hatched: by the ledger)")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return f"picture: {path}"


CAPTION = (
    "s/step: median over steps, of the slowest rank. link alone: what the rate needs for the bytes counted, the fuller "
    "direction."
)
