"""One GPU, one rank, a decoder of 1.345B parameters: what an engine costs when there is nothing to communicate.

    python -m benchmarks.gpu [--json PATH] [--steps 8] [--rounds 2] [--only NAME,...] [--profile DIR]

bf16 compute, fused AdamW, clipping at 1.0, activation checkpointing per block, 8 x 2048 tokens a step. Each contender
runs in a process of its own, once a round, rounds interleaved. Model TFLOP/s is 6 x parameters x tokens / seconds.
With ``--device cpu --size tiny`` the same code runs anywhere, for its own sake and not for its numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.contenders import GPU_CONTENDERS, PROFILED, Contender, by_name
from benchmarks.launch import RunFailedError, run_ranks
from benchmarks.measure import circumstances, command_line, keep, told
from benchmarks.model import PRESETS

GIB = 2**30


def interleave(
    missing: dict[str, str | None], rounds: int, measure: Callable[[str], dict[str, Any]], console: Console
) -> dict[str, Any]:
    """Rounds over all names, every other one backwards: raw figures by name, or why there are none.

    ``missing`` says why a name need not be tried, or None.
    """
    raw: dict[str, Any] = {name: {"rounds": [], "error": reason} for name, reason in missing.items()}
    for number in range(rounds):
        for name in raw if number % 2 == 0 else reversed(raw):
            entry = raw[name]
            if entry["error"]:
                continue
            console.print(f"[dim]round {number + 1}: {name}[/dim]", highlight=False)
            try:
                entry["rounds"].append(measure(name))
            except RunFailedError as failure:
                entry["error"] = str(failure)
    return raw


def measure_all(contenders: Sequence[Contender], args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All rounds of all contenders: raw figures by name, or the line that says why there are none."""
    spec = {"pass": "timing", "size": args.size, "batch": args.batch, "steps": args.steps, "device": args.device}

    def measure(name: str) -> dict[str, Any]:
        return run_ranks("benchmarks.gpu_worker", {**spec, "contender": name}, 1, args.limit, args.device)[0]

    return interleave({one.name: one.missing() for one in contenders}, args.rounds, measure, console)


def summarise(raw: dict[str, Any]) -> dict[str, Any]:
    """Medians over rounds for each contender that has figures."""
    summary: dict[str, Any] = {}
    for name, entry in raw.items():
        rounds = entry["rounds"]
        if not rounds:
            continue
        summary[name] = {key: statistics.median(figures[key] for figures in rounds) for key in ("seconds", "tflops")}
        for key in ("peak_allocated", "peak_reserved", "rest_allocated", "rss_peak"):
            values = [figures[key] for figures in rounds if figures[key] is not None]
            summary[name][key] = max(values) if values else None
        summary[name]["loss"] = rounds[0]["losses"][-1]
    return summary


def gpu_table(summary: dict[str, Any], title: str) -> Table:
    """Absolute figures and ratios to FSDP2."""
    table = Table(title=title, title_justify="left")
    table.add_column("engine", no_wrap=True)
    headings = ("s/step", "TFLOP/s", "peak GiB", "reserved GiB", "rest GiB", "host GiB", "last loss")
    for heading in (*headings, "TFLOP/s /FSDP2", "peak /FSDP2"):
        table.add_column(heading, justify="right")
    fsdp2 = summary.get("fsdp2")
    for name, figures in summary.items():
        memory = ("peak_allocated", "peak_reserved", "rest_allocated", "rss_peak")
        ratios = [
            f"{figures[key] / fsdp2[key]:.3f}" if fsdp2 and fsdp2[key] and figures[key] else "-"
            for key in ("tflops", "peak_allocated")
        ]
        table.add_row(
            name,
            f"{figures['seconds']:.4f}",
            f"{figures['tflops']:.1f}",
            *("-" if figures[key] is None else f"{figures[key] / GIB:.2f}" for key in memory),
            f"{figures['loss']:.4f}",
            *ratios,
        )
    return table


def profile(args: argparse.Namespace, console: Console) -> dict[str, Any] | None:
    """Two steps of stage 3 with its gathers and releases on; writes DIR/streams.json and DIR/trace.json.gz."""
    folder = Path(args.profile).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    contender = PROFILED
    if contender.missing():
        console.print(f"profile: {contender.missing()}", markup=False)
        return None
    spec = {"pass": "profile", "size": args.size, "batch": args.batch, "device": args.device, "profile": str(folder)}
    try:
        run = {**spec, "contender": contender.name}
        summary = run_ranks("benchmarks.gpu_worker", run, 1, args.limit, args.device)[0]
    except RunFailedError as failure:
        console.print(f"profile: {failure}", highlight=False, markup=False)
        return None
    (folder / "streams.json").write_text(json.dumps(summary, indent=1) + "\n")
    for stream, memory_stats in summary["streams"].items():
        work = ", ".join(f"{kind} {duration:.1f} ms" for kind, duration in memory_stats["launched_by_ms"].items())
        beside = memory_stats["overlapped_with_busiest_ms"]
        console.print(
            f"stream {stream}: {memory_stats['busy_ms']:.1f} ms busy, {beside:.1f} ms beside the busiest; {work}"
        )
    console.print(f"profile: {folder / 'streams.json'}; ranges seen: {summary['ranges']}", highlight=False)
    return summary


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=8, help="timed steps per round (default 8)")
    parser.add_argument("--rounds", type=int, default=2, help="interleaved rounds (default 2; 0 to profile only)")
    parser.add_argument("--only", default="", metavar="NAME,...", help="a subset of the contenders")
    parser.add_argument("--size", choices=sorted(PRESETS), default="large", help="the decoder (default large)")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step (default 8)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds until a run is stopped (default 180)")
    parser.add_argument("--profile", default=None, metavar="DIR", help="also profile two steps into this folder")
    parser.add_argument("--json", default=None, metavar="PATH", help="raw results; '-' for none (default results/)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep the raw figures."""
    args = parse_arguments(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device found; try: python -m benchmarks.gpu --device cpu --size tiny")
    console = Console(width=max(Console().width, 140))
    names = [name for name in args.only.split(",") if name]
    contenders = [by_name(GPU_CONTENDERS, name) for name in names] or list(GPU_CONTENDERS)
    raw = measure_all(contenders, args, console)
    summary = summarise(raw)
    command = command_line("gpu", argv)
    report: dict[str, Any] = {
        **circumstances(command, args.device),
        "parameters": PRESETS[args.size].num_parameters,
        "summary": summary,
        "raw": raw,
    }
    console.print(gpu_table(summary, f"{report['command']}  ({report['parameters'] / 1e6:.1f}M parameters, bf16)"))
    for name, entry in raw.items():
        if entry["error"]:
            console.print(f"{name}: {entry['error']}", highlight=False, markup=False)
    console.print(told(report), highlight=False)
    if args.profile:
        report["profile"] = profile(args, console)
    if path := keep(report, "gpu", args.json):
        console.print(f"raw results: {path}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
