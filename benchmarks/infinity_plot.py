"""Step time against model size, beside the floor, and below it where the bytes rest: one picture of several reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.infinity_floor import steady_seconds

TIERS = {"device": "#4c72b0", "host": "#55a868", "disk": "#dd8452"}
GB = 1e9


def merged(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured of each size, smallest first; what a later report says of a size counts."""
    found = {
        run["size"]: run
        for report in reports
        if report["part"] != "disk1b"
        for run in report["runs"].values()
        if run["error"] is None
    }
    return sorted(found.values(), key=lambda run: int(run["parameters"]))


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Both panels, over billions of parameters."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 7), height_ratios=(3, 2))
    billions = [run["parameters"] / 1e9 for run in runs]
    above.plot(billions, [steady_seconds(run["figures"]) for run in runs], "o-", color="#4c72b0", label="step")
    with_floor = [run for run in runs if run["floor"]]
    for name, style in (("floor", "k--"), ("compute", ":"), ("disk", ":"), ("update", ":"), ("bus", ":")):
        above.plot(
            [run["parameters"] / 1e9 for run in with_floor],
            [run["floor"][name] or float("nan") for run in with_floor],
            style,
            label=name,
        )
    above.set_xscale("log")
    above.set_yscale("log")
    above.set_xticks(billions, [f"{one:.1f}" for one in billions])
    above.set_xticks([], minor=True)
    above.set_ylabel("seconds a step")
    above.legend(fontsize=8)
    bottom = [0.0] * len(runs)
    for tier, colour in TIERS.items():
        heights = [sum(run["figures"]["bytes"].get(tier, {}).values()) / GB for run in runs]
        below.bar(range(len(runs)), heights, bottom=bottom, color=colour, label=tier)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    below.set_xticks(range(len(runs)), [run["size"] for run in runs])
    below.set_xlabel("parameters, billions above and by name below")
    below.set_ylabel("GB at rest")
    below.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_files(files: Sequence[Path], path: Path) -> int:
    """One picture of several raw results; how many sizes are in it."""
    runs = merged([json.loads(file.read_text()) for file in files])
    if runs:
        draw(runs, path)
    return len(runs)
