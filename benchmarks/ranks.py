"""Several NCCL ranks on one GPU, each a host of its own to NCCL, which talk through sockets over loopback.

    python -m benchmarks.ranks [--ranks 2,4] [--size base,narrow] [--only NAME,...] [--rounds 2] [--json PATH]
    python -m benchmarks.ranks --together ... all contenders in the same processes, in turns: most of the time is steps
    python -m benchmarks.ranks --tuned ...    once more with several sockets and threads for each pair of ranks
    python -m benchmarks.ranks --floor ...    plain collectives of the same sizes, on one and on two communicators
    python -m benchmarks.ranks --lanes ...    what ran on the device in one step, for benchmarks.link_picture
    python -m benchmarks.ranks --warm-up 2 .. fewer steps before the timed ones, where steps take seconds

bf16 compute, fused AdamW, clipping at 1.0, activation checkpointing per block. The link has about the rate of 10 to 25
Gbit Ethernet, and the ranks share the GPU, so the time of a step is that of the link and of all ranks' compute
together. Each contender runs in processes of its own, once a round, rounds interleaved; with ``--together`` all of them
live in the same processes, one at a time. The seconds of a step are those of the slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contenders import GPU_CONTENDERS, ONLY_BY_NAME, RANK_CONTENDERS, by_name
from benchmarks.gpu import interleave
from benchmarks.gpu_worker import WARM_UP_STEPS
from benchmarks.launch import RunFailedError, run_ranks
from benchmarks.measure import circumstances, command_line, keep, told

GIB = 2**30
LAST_TURN = 60.0  # seconds that the turn of the last contender may take beyond the limit
TUNED = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}


def measure_all(size: str, ranks: int, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Return the raw figures of all rounds at one size and number of ranks, by contender."""
    spec = {"pass": "timing", "size": size, "batch": args.batch, "steps": args.steps, "device": args.device}
    spec["each"], spec["warm_up"] = False, args.warm_up  # a loop that reads its losses, and waits for nothing else
    names = args.only.split(",") if args.only else [one.name for one in RANK_CONTENDERS]
    chosen = [by_name((*RANK_CONTENDERS, *GPU_CONTENDERS, *ONLY_BY_NAME), name) for name in names]
    missing = {one.name: one.missing() for one in chosen}
    if args.together:
        return measure_together(spec, missing, ranks, args)

    def measure(name: str) -> dict[str, Any]:
        return of_slowest(
            run_ranks("benchmarks.gpu_worker", {**spec, "contender": name}, ranks, args.limit, args.device)
        )

    return interleave(missing, args.rounds, measure, console)


def of_slowest(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all ranks, with the seconds of the slowest and the highest peak."""
    peaks = [figures["peak_allocated"] or 0 for figures in found]
    seconds = max(figures["seconds"] for figures in found)
    return {"seconds": seconds, "peak_allocated": max(peaks), "ranks": list(found)}


def measure_together(
    spec: dict[str, Any], missing: dict[str, str | None], ranks: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Return what `interleave` does, of contenders that take turns in the same processes."""
    raw: dict[str, Any] = {name: {"rounds": [], "error": reason} for name, reason in missing.items()}
    names = [name for name, reason in missing.items() if reason is None]
    spec = {**spec, "contenders": names, "rounds": args.rounds, "seconds": args.limit}
    with tempfile.TemporaryDirectory(prefix="shardwell-bench-") as kept:
        ended = None
        try:
            limit = args.limit + LAST_TURN
            run_ranks("benchmarks.ranks_worker", {**spec, "kept": kept}, ranks, limit, args.device)
        except RunFailedError as failure:
            ended = str(failure)
        except KeyboardInterrupt:  # what was measured until then is kept
            ended = "not measured: interrupted"
        of_ranks: list[dict[str, Any]] = []
        for rank in range(ranks):
            with contextlib.suppress(FileNotFoundError):
                of_ranks.append(json.loads(Path(kept, f"{rank}.json").read_text()))
    for name in names if len(of_ranks) == ranks else ():
        entries = [found[name] for found in of_ranks]
        raw[name]["rounds"] = [of_slowest(turn) for turn in zip(*(one["rounds"] for one in entries), strict=False)]
        errors = [one["error"] for one in entries if one["error"]]
        raw[name]["error"] = min(errors, key=lambda words: "another rank" in words, default=None)
    for name in names:
        if not raw[name]["rounds"] and not raw[name]["error"]:
            raw[name]["error"] = ended or f"not measured: {args.limit:.0f} s were over"
    return raw


def measure_floor(size: str, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of plain collectives of the same sizes, by the number of communicators, and of the compute.

    The compute is that of one rank alone, which has no collectives, times the ranks, since they share the device.
    """
    spec = {"size": size, "steps": args.steps, "device": args.device}
    found = run_ranks("benchmarks.link_floor", spec, ranks, args.limit, args.device)
    alone = {**spec, "pass": "timing", "batch": args.batch, "each": False, "contender": "shardwell1"}
    compute = run_ranks("benchmarks.gpu_worker", alone, 1, args.limit, args.device)[0]["seconds"] * ranks
    link = {num: max(figures[num] for figures in found) for num in ("1", "2")}
    return {**found[0], **link, "compute": compute, "least": min(link.values()) + compute}


def measure_lanes(size: str, ranks: int, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Return what ran on the device in one step of each contender."""
    spec = {"pass": "lanes", "size": size, "batch": args.batch, "steps": 1, "device": args.device}
    found: dict[str, Any] = {}
    for name in args.only.split(",") if args.only else ["shardwell3"]:
        try:
            of_ranks = run_ranks("benchmarks.gpu_worker", {**spec, "contender": name}, ranks, args.limit, args.device)
        except RunFailedError as failure:
            found[name] = {"error": str(failure), "ranks": []}
            continue
        found[name] = {"error": None, "ranks": of_ranks}
        shares = ", ".join(f"{lane} {share:.1%}" for lane, share in of_ranks[0]["busy"].items())
        words = f"{name}: {of_ranks[0]['milliseconds']:.0f} ms, link idle {of_ranks[0]['link_idle']:.1%}; {shares}"
        console.print(words, highlight=False)
    return found


def summarise(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the median of the seconds and the largest peak of each contender that has figures."""
    return {
        name: {
            "seconds": statistics.median(figures["seconds"] for figures in entry["rounds"]),
            "least_seconds": min(figures["seconds"] for figures in entry["rounds"]),
            "peak_allocated": max(figures["peak_allocated"] for figures in entry["rounds"]),
            "loss": entry["rounds"][0]["ranks"][0]["losses"][-1],
        }
        for name, entry in raw.items()
        if entry["rounds"]
    }


def ranks_table(summary: dict[str, Any], title: str) -> Table:
    """Return the absolute figures, and ratios to FSDP2."""
    table = Table(title=title, title_justify="left")
    table.add_column("engine", no_wrap=True)
    for heading in ("s/step", "least", "peak GiB", "last loss", "seconds /FSDP2", "peak /FSDP2"):
        table.add_column(heading, justify="right")
    fsdp2 = summary.get("fsdp2")
    for name, figures in summary.items():
        ratios = [
            f"{figures[key] / fsdp2[key]:.3f}" if fsdp2 and fsdp2[key] else "-" for key in ("seconds", "peak_allocated")
        ]
        peak = f"{figures['peak_allocated'] / GIB:.2f}"
        times = f"{figures['seconds']:.4f}", f"{figures['least_seconds']:.4f}"
        table.add_row(name, *times, peak, f"{figures['loss']:.4f}", *ratios)
    return table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--size", default="base", help="sizes of the decoder")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=WARM_UP_STEPS, help="steps before the timed ones")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="names of contenders, with commas")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a run has failed; of all turns")
    parser.add_argument("--together", action="store_true", help="all contenders in the same processes, in turns")
    parser.add_argument("--tuned", action="store_true", help="measure with tuned sockets, too")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--floor", action="store_true", help="measure plain collectives of the same sizes, too")
    parser.add_argument("--lanes", action="store_true", help="measure nothing, and keep what ran in one step")
    parser.add_argument("--json", help="where the raw figures go")
    return parser.parse_args(argv)


def measure_one(size: str, ranks: int, title: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure one size at one number of ranks, print the table, and return the raw figures."""
    raw = measure_all(size, ranks, args, console)
    found: dict[str, Any] = {"summary": summarise(raw), "raw": raw}
    if args.floor:
        try:
            floor = found["floor"] = measure_floor(size, ranks, args)
        except RunFailedError as failure:
            console.print(f"floor: {failure}", markup=False, highlight=False)
        else:
            words = f"floor: {floor['1']:.4f} s on one communicator, {floor['2']:.4f} s on two"
            words += f" ({floor['collectives']} collectives), {floor['compute']:.4f} s of compute by all ranks"
            console.print(f"{words}, so {floor['least']:.4f} s", highlight=False)
    console.print(ranks_table(found["summary"], title))
    for name, entry in raw.items():
        if entry["error"]:
            console.print(f"{name}: {entry['error']}", markup=False, highlight=False)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables, and keep the raw figures."""
    args, console = parse(argv), Console()
    report: dict[str, Any] = {**circumstances(command_line("ranks", argv), args.device), "sizes": {}}
    report["sockets"] = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    for tuned in (False, True) if args.tuned else (False,):
        if tuned:
            os.environ.update(TUNED)
            report["tuned_sockets"] = TUNED
        for size in args.size.split(","):
            for ranks in (int(count) for count in args.ranks.split(",")):
                name = f"{size} x {ranks}{', tuned sockets' if tuned else ''}"
                if args.lanes:
                    report.setdefault("lanes", {})[name] = measure_lanes(size, ranks, args, console)
                    continue
                title = f"{size}, {ranks} ranks on one {args.device}{', tuned sockets' if tuned else ''}"
                report["sizes"][name] = measure_one(size, ranks, title, args, console)
                keep(report, "ranks", args.json)  # a run that is cut off leaves what it had
    console.print(told(report), highlight=False)
    if path := keep(report, "ranks", args.json):
        console.print(f"raw results: {path}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
