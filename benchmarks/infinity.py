"""One GPU, one rank, parameters and optimizer state on host and disk: how fast, how large, and what is possible at all.

    python -m benchmarks.infinity --nvme DIRECTORY [--part disk1b|largest|growth] [--only NAME,...] [--clip]
    python -m benchmarks.infinity --plot FILE... [--png PATH]

Part ``disk1b`` trains 1.345B parameters (8 x 2048 tokens) with states on disk and on the host, beside DeepSpeed.
``largest`` trains 25B, 40B with 8-bit moments and 21B with clipping (4 x 1024), born sharded and placed wherever there
is room. ``growth`` does so from 1.3B up, two steps each; ``--plot`` draws what several runs left. bf16, AdamW,
activation checkpointing per block, each run in a process of its own. The floor is measured too, see
``benchmarks.infinity_floor``. Disk busy is bytes moved over the drive's speed when it reads and writes at once, and
steady is what a step takes when all of its bytes are counted, though some move behind the last one. With ``--device cpu
--size tiny`` the same code runs anywhere, for its own sake and not for its numbers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.infinity_floor import FORMULAS, drive_speed, floor_of, steady_seconds
from benchmarks.infinity_plot import draw_files
from benchmarks.infinity_variants import SIZES, VARIANTS, Run, runs_of
from benchmarks.launch import RunFailedError, Runs
from benchmarks.measure import RESULTS, circumstances, keep, told
from benchmarks.offload import number
from shardwell.offload.disk_file import file_system

PARTS = ("disk1b", "largest", "growth")
TARGET = 1.15  # of the floor
SPARE = 30.0  # seconds of a process that are not for steps: it starts, and ends with what is still on its way
GIB = 2**30
COMPILING = 150.0  # seconds for what a peer compiles at its first use
MOVED = ("up", "down", "disk")


def chosen_runs(args: argparse.Namespace) -> dict[str, Run]:
    """The runs of a part that were asked for, as they were asked for."""
    found = runs_of(args.part, args.size, args.peer_limit)
    for name in args.only:
        if name not in found:
            raise SystemExit(f"--only {name}: {args.part} has {', '.join(found)}")
    found = {name: run for name, run in found.items() if not args.only or name in args.only}
    if args.part != "disk1b":
        found = {name: replace(run, size=args.size if args.size == "tiny" else run.size) for name, run in found.items()}
        found = {name: replace(run, variant=args.rest or run.variant) for name, run in found.items()}
    found = {name: replace(run, steps=args.steps or run.steps) for name, run in found.items()}
    return {name: replace(run, limit=args.limit or run.limit) for name, run in found.items()}


def spec_of(run: Run, args: argparse.Namespace, drive: str, left: float) -> dict[str, Any]:
    """What the process of a run is told."""
    return {
        "pass": "steps",
        "size": run.size,
        "variant": run.variant,
        "warm_up": run.warm_up,
        "steps": run.steps,
        "seconds": min(run.limit, left) - SPARE,
        "own": json.loads(args.own),
        "clip": args.clip,
        "batch": args.batch,
        "device": args.device,
        "drive": drive,
    }


def measure_run(
    name: str, run: Run, start: Runs, args: argparse.Namespace, rates: dict[str, Any], trouble: Callable[[], str | None]
) -> dict[str, Any]:
    """The figures of a run with its floor, or why there are none. What it leaves on the drive is removed."""
    found: dict[str, Any] = {
        "size": run.size,
        "variant": run.variant,
        "parameters": SIZES[run.size].model.num_parameters,
        "error": trouble() if VARIANTS[run.variant].engine == "deepspeed" else None,
        "figures": None,
        "floor": None,
    }
    if found["error"]:
        return found
    try:
        with tempfile.TemporaryDirectory(prefix="shardwell-bench-", dir=args.nvme) as drive:
            found["figures"] = start(name, spec_of(run, args, drive, start.seconds_left), run.limit)
    except RunFailedError as failure:
        found["error"] = str(failure)
        return found
    return found | judged(found["figures"], rates, run.size)


def judged(figures: dict[str, Any], rates: dict[str, Any], size: str) -> dict[str, Any]:
    """The floor, the ratio to it, and the share of the drive's speed that was used."""
    if "drive" not in rates:
        return {}
    used, moved = figures["usage"], drive_speed(figures, rates)
    bytes_moved = used["disk_read"] + used["disk_written"] or used["process_moved"] or 0  # a peer has its own tier
    used["disk_busy"] = bytes_moved / (moved * used["seconds"])
    if "demands" not in figures:
        return {}
    floor, steady = floor_of(figures, rates, size), steady_seconds(figures)
    return {"floor": floor, "steady": steady, "/floor": steady / floor["floor"]}


def measure_rates(sizes: set[str], start: Runs, args: argparse.Namespace) -> dict[str, Any]:
    """The parts of the floor, or why there are none."""
    with tempfile.TemporaryDirectory(prefix="shardwell-bench-", dir=args.nvme) as drive:
        spec = {"pass": "floor", "sizes": sorted(sizes), "batch": args.batch, "device": args.device, "drive": drive}
        try:
            return start("floor", spec, args.limit or 180.0)
        except RunFailedError as failure:
            return {"error": str(failure)}


def against_peer(name: str, runs: dict[str, Any]) -> float | None:
    """How many times as fast as DeepSpeed's fastest; None if one of them did not run."""
    mine = runs[name]["figures"]
    theirs = [run["figures"] for run in runs.values() if VARIANTS[run["variant"]].engine == "deepspeed"]
    found = [figures["seconds"] for figures in theirs if figures is not None]
    return min(found) / mine["seconds"] if mine is not None and found else None


def peer_trouble(start: Runs, args: argparse.Namespace) -> str | None:
    """Why DeepSpeed cannot run here; None when it has compiled what it needs."""
    if reason := VARIANTS["deepspeed3:disk"].missing():
        return reason
    try:
        start("peer", {"pass": "peer", "device": args.device}, COMPILING)
    except RunFailedError as failure:
        return str(failure)
    return None


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def run_table(runs: dict[str, Any], title: str) -> Table:
    """A line for each run that has figures."""
    table = Table(title=title, title_justify="left")
    table.add_column("run", no_wrap=True)
    headings = ("10^9", "build s", "s/step", "steady", "floor", "/floor", "/DeepSpeed", "tokens/s", "GPU GiB")
    for heading in (*headings, "host GiB", "disk GiB", "GPU busy", "update busy", "disk busy", "losses"):
        table.add_column(heading, justify="right")
    for name, run in runs.items():
        if run["figures"] is None:
            continue
        figures, used = run["figures"], run["figures"]["usage"]
        memory = [figures[key] for key in ("peak_allocated", "rss_peak", "disk_used")]
        table.add_row(
            name,
            number(run["parameters"] / 1e9, 3),
            number(figures["build_seconds"], 1),
            number(figures["seconds"], 3),
            number(run.get("steady"), 3),
            number(run["floor"]["floor"] if run["floor"] else None, 3),
            number(run.get("/floor")),
            number(against_peer(name, runs)),
            number(figures["tokens_per_second"], 0),
            *(number(None if value is None else value / GIB) for value in memory),
            *(percent(used.get(key)) for key in ("gpu_busy", "update_busy", "disk_busy")),
            f"{figures['losses'][0]:.3f} to {figures['losses'][-1]:.3f}",
        )
    return table


def tell_run(name: str, run: dict[str, Any], console: Console) -> None:
    """What the table has no room for: errors, where states rest, every step."""
    if run["error"]:
        console.print(f"{name}: {run['error']}", highlight=False, markup=False)
        return
    figures = run["figures"]
    lines = [f"steps {', '.join(f'{one:.2f}' for one in figures['step_seconds'])} s"]
    if "places" in figures:
        lines += [
            f"{place['numel'] / 1e9:.2f}e9 with parameters on {place['parameters']}, state on {place['optimizer']}"
            for place in figures["places"]
        ]
        held = {tier: sum(states.values()) / 1e9 for tier, states in figures["bytes"].items()}
        lines.append(f"GB at rest: {', '.join(f'{tier} {size:.1f}' for tier, size in held.items())}")
        lines.append("GB a step: " + ", ".join(f"{key} {figures['demands'][key] / 1e9:.1f}" for key in MOVED))
    if figures.get("kept_up"):
        lines.append(f"the drive kept up {', '.join(f'{rate / 1e9:.2f}' for rate in figures['kept_up'])} GB/s")
    if run["floor"]:
        lines.append(", ".join(f"{part} {seconds:.3f}" for part, seconds in run["floor"].items()))
    if figures["note"]:
        lines.append(figures["note"])
    console.print(f"{name}: {'; '.join(lines)}", highlight=False, markup=False)


def tell_rates(rates: dict[str, Any], console: Console) -> None:
    if "drive" not in rates:
        console.print(f"floor: {rates['error']}", highlight=False, markup=False)
        return
    drive = ", ".join(f"{job} {rate / 1e9:.2f}" for job, rate in rates["drive"].items())
    bus = "no bus" if rates["bus"] is None else f"bus {rates['bus']['each_of_both'] / 1e9:.1f} each way"
    update = f"updates {rates['update']['fp32'] / 1e9:.2f}e9 elements a second ({rates['update']['threads']} threads)"
    console.print(f"GB/s: drive {drive}; {bus}; {update}", highlight=False)
    console.print("; ".join(f"{name}: {formula}" for name, formula in FORMULAS.items()), highlight=False)


def command_line(args: argparse.Namespace) -> str:
    """The command that repeats this run; folders of the machine are left out."""
    words = [f"python -m benchmarks.infinity --part {args.part} --nvme DIRECTORY"]
    words += [f"--only {','.join(args.only)}"] if args.only else []
    for name in ("size", "rest", "steps", "batch", "own", "device"):
        value = getattr(args, name)
        words += [f"--{name} {value}"] if value not in ("", 0, "{}", "cuda", "1b") else []
    return " ".join([*words, "--clip"] if args.clip else words)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.infinity", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nvme", default=None, metavar="DIRECTORY", help="on a local drive; written to")
    parser.add_argument("--part", choices=PARTS, default="disk1b")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="NAME,...", help="of a part")
    parser.add_argument("--size", choices=("1b", "tiny"), default="1b", help="of disk1b; tiny: of every part")
    parser.add_argument("--rest", choices=tuple(VARIANTS), default="", help="largest, growth: where states rest")
    parser.add_argument("--own", default="{}", metavar="JSON", help='added to the block "shardwell", e.g. memory')
    parser.add_argument("--clip", action="store_true", help="clip at 1, and commit after the norm")
    parser.add_argument("--steps", type=int, default=0, help="timed steps (default: 3; growth: 2)")
    parser.add_argument("--batch", type=int, default=0, help="sequences a step (default: by size)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds until a process is stopped")
    parser.add_argument("--peer-limit", type=float, default=120.0, help="the same for a peer's (default 120)")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for the whole run (default 570)")
    parser.add_argument("--logs", type=Path, default=None, metavar="DIR", help="keep what every process wrote")
    parser.add_argument("--json", default=None, metavar="PATH", help="raw results; '-' for none (default results/)")
    parser.add_argument("--plot", type=Path, nargs="+", default=[], metavar="FILE", help="draw these; run nothing")
    parser.add_argument("--png", type=Path, default=RESULTS / "infinity.png", metavar="PATH", help="of the plot")
    return parser.parse_args(argv)


def measure_all(runs: dict[str, Run], args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The floor, then one run after the other. What is known is kept at once, for the next one may be stopped."""
    start = Runs("benchmarks.infinity_worker", args.device, args.budget, args.logs)
    report: dict[str, Any] = circumstances(command_line(args), "cpu")  # this process leaves the GPU alone
    report |= {"part": args.part, "formulas": FORMULAS, "target": TARGET, "runs": {}}
    console.print("[dim]the floor[/dim]", highlight=False)
    report["rates"] = rates = measure_rates({run.size for run in runs.values()}, start, args)
    on = {"device": rates.get("device", args.device), "file_system": file_system(Path(args.nvme))}
    report["machine"] |= on
    trouble = cache(lambda: peer_trouble(start, args))
    for name, run in runs.items():
        console.print(f"[dim]{name}[/dim]", highlight=False)
        report["runs"][name] = measure_run(name, run, start, args, rates, trouble)
        tell_run(name, report["runs"][name], console)
        keep(report, f"infinity-{args.part}", args.json)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep the raw figures; or draw what was kept."""
    args, console = parse_arguments(argv), Console(width=max(Console().width, 180))
    if args.plot:
        console.print(f"{draw_files(args.plot, args.png)} sizes: {args.png}", highlight=False)
        return 0
    if args.nvme is None:
        raise SystemExit("--nvme: name a directory on a local drive")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device found; try: python -m benchmarks.infinity --device cpu --size tiny --nvme .")
    report = measure_all(chosen_runs(args), args, console)
    console.print(run_table(report["runs"], report["command"]))
    tell_rates(report["rates"], console)
    console.print(told(report), highlight=False)
    if path := keep(report, f"infinity-{args.part}", args.json):
        console.print(f"raw results: {path}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
