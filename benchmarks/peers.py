"""shardwell against its peers on one machine: CPU time, memory and traffic of a training step, all in one run.

    python -m benchmarks.peers [--ranks 2] [--batch 1] [--steps 8] [--rounds 3] [--only NAME,...] [--json PATH]

Every contender runs in fresh processes (so that peaks do not mix), once a round, and the rounds are interleaved (so
that a slow minute of the machine hits everyone). A figure is the median over rounds; loopback bytes are the least over
rounds, because other programs can only add to them. A contender whose losses leave those of DDP is marked as wrong and
meets no target.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.contenders import PEER_CONTENDERS, Contender, by_name
from benchmarks.launch import RunFailedError, run_ranks
from benchmarks.measure import command_line, machine, versions
from benchmarks.model import PRESETS
from benchmarks.report import judged, peers_table, targets_table

RESULTS = Path(__file__).parent / "results"
REFERENCE = "ddp"  # always runs: the losses of the others are compared with its losses
LOSS_TOLERANCE = 2e-3


def measure_all(contenders: Sequence[Contender], args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All rounds of all contenders: raw figures by name, or the line that says why there are none."""
    raw: dict[str, Any] = {contender.name: {"timing": [], "memory": None, "error": None} for contender in contenders}
    spec = {"size": args.size, "batch": args.batch, "steps": args.steps}
    passes = [("timing", number) for number in range(args.rounds)] + [("memory", 0)]
    for kind, number in passes:
        ordered = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        for contender in ordered:
            entry = raw[contender.name]
            entry["error"] = entry["error"] or contender.missing()
            if entry["error"]:
                continue
            console.print(f"[dim]{kind} {number + 1}: {contender.name}[/dim]", highlight=False)
            try:
                figures = run_ranks(
                    "benchmarks.worker", {**spec, "pass": kind, "contender": contender.name}, args.ranks, args.limit
                )
            except RunFailedError as failure:
                entry["error"] = str(failure)
                continue
            if kind == "timing":
                entry["timing"].append(figures)
            else:
                entry["memory"] = figures
    return raw


def loss_deviation(entry: dict[str, Any], reference: dict[str, Any] | None) -> float | None:
    """The greatest distance of any rank's loss at any step from the reference's; infinite if a loss is no number."""
    if reference is None or not reference["timing"] or not entry["timing"]:
        return None
    pairs = zip(reference["timing"][0], entry["timing"][0], strict=True)
    gaps = [abs(a - b) for ours, theirs in pairs for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
    return max(gaps) if all(math.isfinite(gap) for gap in gaps) else math.inf


def summarise(raw: dict[str, Any]) -> dict[str, Any]:
    """One flat dictionary of figures per contender that has any."""
    summary: dict[str, Any] = {}
    for name, entry in raw.items():
        if entry["error"] or not entry["timing"] or not entry["memory"]:
            continue
        rounds, memory = entry["timing"], entry["memory"]
        wires = [figures[0]["wire_bytes"] for figures in rounds if figures[0]["wire_bytes"] is not None]
        deviation = loss_deviation(entry, raw.get(REFERENCE))
        summary[name] = {
            "seconds": statistics.median(figures[0]["seconds"] for figures in rounds),
            "cpu_seconds": statistics.median(statistics.mean(f["cpu_seconds"] for f in figures) for figures in rounds),
            "wire_bytes": min(wires) if wires else None,
            "payload_bytes": sum(figures["payload_bytes"] for figures in memory),
            "loss": rounds[0][0]["losses"][-1],
            "loss_deviation": deviation,
            "right": deviation is None or deviation <= LOSS_TOLERANCE,
        }
        for key in ("peak_bytes", "rest_bytes", "gc_rest_bytes", "heap_peak_bytes", "heap_rest_bytes"):
            summary[name][key] = max(figures[key] for figures in memory)
    return summary


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine (default 2)")
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank (default 1)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps per round (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--only", default="", metavar="NAME,...", help="a subset of the contenders")
    parser.add_argument("--size", choices=sorted(PRESETS), default="small", help="the decoder (default small)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds until a pass is stopped (default 180)")
    parser.add_argument("--json", default=None, metavar="PATH", help="raw results; '-' for none (default results/)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep the raw figures; the exit status is 1 when a target was measured and missed."""
    args = parse_arguments(argv)
    names = [name for name in args.only.split(",") if name]
    contenders = [by_name(PEER_CONTENDERS, name) for name in names] or list(PEER_CONTENDERS)
    if REFERENCE not in [contender.name for contender in contenders]:
        contenders.insert(0, by_name(PEER_CONTENDERS, REFERENCE))
    console = Console(width=max(Console().width, 150))
    command = command_line("peers", argv)
    raw = measure_all(contenders, args, console)
    summary = summarise(raw)
    verdicts = judged(summary)
    report: dict[str, Any] = {
        "command": command.strip(),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "parameters": PRESETS[args.size].num_parameters,
        "settings": {key: getattr(args, key) for key in ("ranks", "batch", "steps", "rounds", "size")},
        "summary": summary,
        "targets": verdicts,
        "raw": raw,
    }
    console.print(
        peers_table(summary, title=f"{report['command']}  ({report['parameters'] / 1e6:.1f}M parameters, fp32)")
    )
    for name, entry in raw.items():
        if entry["error"]:
            console.print(f"{name}: {entry['error']}", highlight=False, markup=False)
    console.print(targets_table(verdicts))
    found = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    console.print(f"{report['machine']['cpu']}, {report['machine']['cores']} cores; {found}", highlight=False)
    if args.json != "-":
        path = Path(args.json) if args.json else RESULTS / f"peers-{report['date'][:10]}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"raw results: {path}", highlight=False)
    return 1 if any(verdict["met"] is False for verdict in verdicts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
