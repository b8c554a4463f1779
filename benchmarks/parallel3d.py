"""Tensor, pipeline and data parallelism together, beside torch's and DeepSpeed's, on ranks that share one device.

    python -m benchmarks.parallel3d [--device cuda] [--size base] [--only NAME,...] [--limit 60] [--folder PATH]

Two kinds of cases. `exact`: a tiny model in fp64 on NCCL and on gloo, against one process of plain PyTorch, with the
bits of the parameters at the end. `timed`: bf16 with clipping and AdamW, seconds a step of the slowest rank and memory
at the peak of the largest; the same model and the same rows for all. Each case is kept in a file of its own as soon as
it ends. On CUDA every rank is a host of its own to NCCL, over loopback.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.launch import RunFailedError, run_ranks, without_folders
from benchmarks.measure import circumstances, command_line, told

RESULTS = Path(__file__).parent / "results"
MIB = 2**20


@dataclass(frozen=True)
class Launch:
    """Cases that the same processes run."""

    name: str
    ranks: int
    cases: tuple[dict[str, Any], ...]
    library: str = ""  # the backend; empty: that of the device
    common: dict[str, Any] = field(default_factory=dict)


def case(engine: str = "shardwell", pp: int = 1, tp: int = 1, stage: int = 1, **more: Any) -> dict[str, Any]:
    """Return the description of one case."""
    return {"engine": engine, "pp": pp, "tp": tp, "stage": stage, **more}


EXACT: dict[str, Any] = {"precision": "fp64", "size": "tiny", "steps": 3, "micro_batches": 2}
TIMED: dict[str, Any] = {"precision": "bf16", "micro_batches": 4}
TWO = (
    case(tp=2),
    case(tp=2, stage=3),
    case(tp=2, stage=3, cut="torch"),  # a model that comes as DTensors
    case(pp=2),
    case(pp=2, schedule="zb-h1", stage=2),
)
FOUR = (case(tp=2, stage=3), case(pp=2, stage=1), case(tp=2, pp=2, stage=1))
EIGHT = (case(tp=2, pp=2, stage=1),)
LAUNCHES = (
    Launch("exact-2", 2, TWO, common=EXACT),
    Launch("exact-2-gloo", 2, TWO, "gloo", EXACT),
    Launch("exact-4", 4, FOUR, common=EXACT),
    Launch("exact-4-gloo", 4, FOUR, "gloo", EXACT),
    Launch("exact-8", 8, EIGHT, common=EXACT),
    Launch("exact-4-queues-8", 4, FOUR[2:], common={**EXACT, "queues": 8}),  # CUDA's default number of hardware queues
    Launch("tp2-dp2-shardwell", 4, (case(tp=2, stage=3),), common=TIMED),
    Launch("tp2-dp2-torch", 4, (case("torch", tp=2, stage=3),), common=TIMED),
    Launch("pp2-dp2-shardwell", 4, (case(pp=2, stage=1),), common=TIMED),
    Launch("pp2-dp2-shardwell-blocks", 4, (case(pp=2, stage=1, own={"bundle_size": 0}),), common=TIMED),  # many units
    Launch("pp2-dp2-shardwell-bf16", 4, (case(pp=2, stage=1, wire="bf16"),), common=TIMED),  # gradients travel in it
    Launch("pp2-dp2-torch", 4, (case("torch", pp=2, stage=1),), common=TIMED),
    Launch("pp2-dp2-deepspeed", 4, (case("deepspeed", pp=2, stage=1),), common=TIMED),
    Launch("tp2-shardwell", 2, (case(tp=2, stage=1),), common=TIMED),
    Launch("tp2-torch", 2, (case("torch", tp=2, stage=1),), common=TIMED),
    Launch("pp2-shardwell", 2, (case(pp=2, stage=1),), common=TIMED),
    Launch("3d-shardwell", 8, (case(tp=2, pp=2, stage=1),), common=TIMED),
)


def run(launch: Launch, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the cases of a launch, and keep their figures in a file."""
    usual = "nccl" if args.device == "cuda" else "gloo"
    spec = {"size": args.size, "steps": args.steps, "warm_up": 2, "queues": 32, "patience": args.limit * 0.8}
    spec |= {**launch.common, "cases": launch.cases}
    spec |= {"device": args.device, "backend": launch.library or usual}
    found: dict[str, Any] = {"name": launch.name, "ranks": launch.ranks, "spec": spec, "error": None, "cases": []}
    begin = time.monotonic()
    try:
        log = folder / f"{launch.name}.log"  # of rank 0, with the stacks of one that waits
        answers = run_ranks("benchmarks.parallel3d_worker", spec, launch.ranks, args.limit, args.device, log)
        found["cases"] = [joined([answer["cases"][at] for answer in answers]) for at in range(len(launch.cases))]
    except RunFailedError as failure:
        found["error"] = without_folders(str(failure))
    found["wall_seconds"] = time.monotonic() - begin
    report = {**circumstances(command_line("parallel3d", None), args.device), **found}
    (folder / f"{launch.name}.json").write_text(json.dumps(report, indent=1))
    return report


def joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all ranks as one: the slowest, the largest, the furthest; bits by parameter."""
    if "digests" not in answers[0]:
        slowest = max(answers, key=lambda one: one["seconds"])
        peaks = [one["peak_allocated"] for one in answers]
        return {**slowest, "peak_allocated": max(peaks), "peaks": peaks, "losses": max(a["losses"] for a in answers)}
    digests: dict[str, set[str]] = {}
    for one in answers:
        for name, bits in one["digests"].items():
            digests.setdefault(name, set()).add(bits)
    return {
        "distance": max(one["distance"] for one in answers),
        "ranks_agree": all(len(bits) == 1 for bits in digests.values()),
        "digests": {name: sorted(bits)[0] for name, bits in digests.items()},
        "seconds": max(one["total_seconds"] for one in answers),
        "losses": max(one["losses"] for one in answers),
    }


def layout(spec: dict[str, Any], ranks: int) -> str:
    """Return a layout in words."""
    sizes = {"pp": spec["pp"], "tp": spec["tp"], "dp": ranks // (spec["pp"] * spec["tp"])}
    words = "x".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
    more = [spec["schedule"]] if "schedule" in spec else []
    return " ".join([words, f"stage {spec['stage']}", *more, *(["DTensors"] if spec.get("cut") else [])])


def exact_table(reports: dict[str, dict[str, Any]]) -> Table:
    """Return the distances to plain PyTorch, and whether NCCL and gloo give the same bits."""
    table = Table(title="fp64 against one process of plain PyTorch", title_justify="left")
    for heading in ("case", "layout", "distance", "ranks agree", "bits as on gloo"):
        table.add_column(heading)
    for name, report in reports.items():
        for at, found in enumerate(report["cases"]):
            if "digests" in found:
                other = reports.get(f"{name}-gloo", {}).get("cases") or []
                same = str(found["digests"] == other[at]["digests"]) if len(other) > at else "-"
                words = layout(report["spec"]["cases"][at], report["ranks"])
                table.add_row(name, words, f"{found['distance']:.1e}", str(found["ranks_agree"]), same)
    return table


def timed_table(reports: dict[str, dict[str, Any]], size: str) -> Table:
    """Return seconds and peaks, and their ratios to torch in the same layout."""
    table = Table(title=f"{size} in bf16", title_justify="left")
    for heading in ("case", "layout", "s/step", "peak MiB", "last loss", "seconds /torch", "peak /torch"):
        table.add_column(heading)
    for name, report in reports.items():
        for spec, found in zip(report["spec"]["cases"], report["cases"], strict=False):
            if "digests" in found:
                continue
            peer = reports.get(f"{name.rpartition('-')[0]}-torch", {}).get("cases")
            ratios = [
                f"{found[key] / peer[0][key]:.3f}" if peer and peer[0][key] else "-"
                for key in ("seconds", "peak_allocated")
            ]
            words, peak = layout(spec, report["ranks"]), f"{found['peak_allocated'] / MIB:.0f}"
            table.add_row(name, words, f"{found['seconds']:.4f}", peak, f"{found['losses'][-1]:.4f}", *ratios)
    return table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", default="base", help="size of the decoder in timed cases")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="", help="names of cases, with commas")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a case has failed")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which no case begins")
    parser.add_argument("--folder", type=Path, default=RESULTS / "parallel3d", help="where each case is kept")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, keep each case, print tables; 1 if a case of this project's failed."""
    args, console = parse(argv), Console(width=140)
    args.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.budget
    reports: dict[str, dict[str, Any]] = {}
    for launch in LAUNCHES:
        if args.only and launch.name not in args.only.split(","):
            continue
        if time.monotonic() > end:
            console.print(f"{launch.name}: not begun, {args.budget:.0f} s are over", highlight=False)
            continue
        report = reports[launch.name] = run(launch, args, args.folder)
        words = report["error"] or "done"
        console.print(f"{launch.name}: {words} ({report['wall_seconds']:.1f} s)", markup=False, highlight=False)
    console.print(exact_table(reports))
    console.print(timed_table(reports, args.size))
    for report in list(reports.values())[:1]:
        console.print(told(report), highlight=False)
    return int(any(one["error"] for name, one in reports.items() if not name.endswith(("torch", "deepspeed"))))


if __name__ == "__main__":
    raise SystemExit(main())
