"""What ZeRO++ costs in accuracy: the loss of a small GPT on text that it was not trained on, as a ratio to stage 3's.

    python -m benchmarks.accuracy [--steps 500] [--only NAME,...] [--limit 900] [--json PATH]

Four ranks of one thread as two nodes of two, in fp32: a GPT over bytes learns the first half of the sources of Python's
standard library and is tested on pieces of the second. Every variant starts from the same seed and sees the same bytes.
With encoded parameters it is tested with these, as it computes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.accuracy_worker import VARIANTS, Lesson
from benchmarks.launch import RunFailedError, run_ranks, without_folders
from benchmarks.measure import circumstances, command_line, keep, told

RANKS = 4
REFERENCE = "stage3"  # always runs


def learn_all(variants: Sequence[str], lesson: Lesson, limit: float, console: Console) -> dict[str, Any]:
    """Held-out loss before and after, and the curve of the mean over ranks, by variant; or what went wrong."""
    found: dict[str, Any] = {}
    for variant in variants:
        console.print(f"[dim]{variant}[/dim]", highlight=False)
        try:
            spec = {"variant": variant, "lesson": asdict(lesson)}
            ranks = run_ranks("benchmarks.accuracy_worker", spec, RANKS, limit)
        except RunFailedError as failure:
            found[variant] = {"error": without_folders(str(failure))}
            continue
        curve = [statistics.mean(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)]
        found[variant] = {"before": ranks[0]["before"], "after": ranks[0]["after"], "curve": curve}
    return found


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Held-out loss over the reference's, of every variant that has one."""
    after = {variant: entry["after"] for variant, entry in found.items() if "error" not in entry}
    return {variant: loss / after[REFERENCE] for variant, loss in after.items()} if REFERENCE in after else {}


def table(found: dict[str, Any], title: str) -> Table:
    drawn = Table(title=title, title_justify="left")
    for column in ("variant", "before", "after", f"of {REFERENCE}'s", "last training losses"):
        drawn.add_column(column, justify="left" if column == "variant" else "right")
    ratio = ratios(found)
    for variant, entry in found.items():
        if "error" not in entry:
            figures = (entry["before"], entry["after"], ratio.get(variant), statistics.mean(entry["curve"][-20:]))
            drawn.add_row(variant, *("" if figure is None else f"{figure:.4f}" for figure in figures))
    return drawn


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=Lesson.steps, help=f"steps of training (default {Lesson.steps})")
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"a subset of {', '.join(VARIANTS)}")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds until a variant is stopped (default 900)")
    parser.add_argument("--json", default=None, metavar="PATH", help="raw results; '-' for none (default results/)")
    args = parser.parse_args(argv)
    args.only = [name for name in args.only.split(",") if name] or list(VARIANTS)
    if unknown := [name for name in args.only if name not in VARIANTS]:
        parser.error(f"unknown variant {unknown[0]!r}; choose from: {', '.join(VARIANTS)}")
    if args.steps < 1:
        parser.error(f"--steps: found {args.steps}, expected at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Learn, print, keep the raw figures; the exit status is 1 when a variant failed."""
    args = parse_arguments(argv)
    console = Console(width=max(Console().width, 100))
    command = command_line("accuracy", argv)
    lesson = Lesson(steps=args.steps)
    report: dict[str, Any] = {**circumstances(command, "cpu"), "ranks": RANKS, "lesson": asdict(lesson)}
    found = learn_all(list(dict.fromkeys([REFERENCE, *args.only])), lesson, args.limit, console)
    report |= {"ratios": ratios(found), "variants": found}
    console.print(table(found, f"{report['command']}  (loss on text that was not trained on)"))
    errors = {variant: entry["error"] for variant, entry in found.items() if "error" in entry}
    for variant, error in errors.items():
        console.print(f"{variant}: {error}", highlight=False, markup=False)
    console.print(told(report), highlight=False)
    path = keep(report, "accuracy", args.json)
    if path is not None:
        console.print(f"raw results: {path}", highlight=False)
    return 1 if errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
