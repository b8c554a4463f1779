"""A picture of one step on several ranks: compute, all-gathers, reductions and copies over time, before and after.

    python -m benchmarks.link_picture PICTURE [WORDS=]REPORT...

The reports are those of ``benchmarks.ranks --lanes``; each run in them gets a panel with its rank 0, and the words of
its report in its title.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.streams import LANES

COLOURS = {"compute": "#4c72b0", "all-gather": "#55a868", "reduction": "#dd8452", "copy": "#999999"}


def panels(reports: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """A title and the lanes of rank 0 for each run of the reports, which come with words."""
    return [
        (f"{name}, {size} ranks{words and ', '}{words}", run["ranks"][0])
        for words, report in reports
        for size, runs in report["lanes"].items()
        for name, run in runs.items()
        if run["error"] is None
    ]


def draw(found: list[tuple[str, dict[str, Any]]], path: Path) -> None:
    """Draw all panels over one axis of milliseconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(found), 1, sharex=True, squeeze=False, figsize=(12, 1.9 * len(found) + 0.6))
    for axis, (title, one) in zip(axes[:, 0], found, strict=True):
        for height, lane in enumerate(reversed(LANES)):
            spans = [(begin, end - begin) for begin, end in one["lanes"][lane]]
            axis.broken_barh(spans, (height - 0.4, 0.8), color=COLOURS[lane])
        axis.set_yticks(range(len(LANES)), list(reversed(LANES)))
        axis.set_title(
            f"{title}: {one['milliseconds']:.0f} ms, link idle {one['link_idle']:.1%}", loc="left", fontsize=9
        )
    axes[-1, 0].set_xlabel("milliseconds")
    figure.tight_layout()
    figure.savefig(path)


def main(argv: list[str]) -> int:
    """Draw the reports in argv[1:] into the picture argv[0]."""
    named = [name.rpartition("=")[::2] for name in argv[1:]]
    draw(panels([(words, json.loads(Path(path).read_text())) for words, path in named]), Path(argv[0]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
