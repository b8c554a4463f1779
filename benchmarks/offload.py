"""One GPU, one rank, optimizer state in host memory: shardwell beside DeepSpeed, FSDP2, and what is possible at all.

    python -m benchmarks.offload [--size 1b,3b,13b] [--only NAME,...] [--rounds 1] [--timeline PATH.png] [--json PATH]

bf16 compute, AdamW, activation checkpointing per block, 8 x 2048 tokens a micro-step. Every variant runs once a round
in a process of its own, rounds interleaved. Model TFLOP/s is 6 x parameters x tokens / seconds. Host bytes are the peak
of the process' own pages over its whole life, less what it had when the engine was imported and the GPU was there.
The floor is measured in the same run, see ``benchmarks.offload_floor``. Size ``13b`` has a GPU of 32 GiB and 4 x 1024
tokens. With ``--device cpu --size tiny`` the same code runs anywhere, for its own sake and not for its numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu import interleave, summarise
from benchmarks.launch import RunFailedError, Runs
from benchmarks.measure import circumstances, command_line, keep, told
from benchmarks.offload_floor import FORMULAS, floor_of
from benchmarks.offload_timeline import draw
from benchmarks.offload_variants import SIZES, VARIANTS

GIB = 2**30
PEERS = {"DeepSpeed": "deepspeed", "FSDP2": "fsdp2"}
DRAWN = ("shardwell2:at-once", "shardwell2:after-norm:clip")
BYTES_UPDATED = 28  # that an update with fp32 moments reads and writes for each parameter
EXTRA = (
    "host_bytes_per_parameter",
    "host_rest_bytes_per_parameter",
    "machine_bytes_per_parameter",
    "tokens_per_second",
    "clip_rate",
    "note",
)


@dataclass(frozen=True)
class Passes:
    """Starts the pass of a variant in a process of its own."""

    runs: Runs
    args: argparse.Namespace

    def __call__(self, what: str, size: str, variant: str) -> dict[str, Any]:
        steps = self.args.steps or SIZES[size].steps
        spec = {"pass": what, "size": size, "variant": variant, "steps": steps, "device": self.args.device}
        return self.runs(f"{size}-{what}-{variant}", spec, self.args.limit or SIZES[size].limit)


def measure_size(size: str, names: Sequence[str], passes: Passes, console: Console) -> dict[str, Any]:
    """The floor and all variants of one size, with every ratio."""
    rounds, floor = passes.args.rounds, dict[str, Any](error=None)
    if passes.args.without_floor:
        floor["error"] = "not measured"
    elif rounds:
        console.print(f"[dim]{size}: the floor[/dim]", highlight=False)
        try:
            floor |= passes("floor", size, "shardwell2-device")
        except RunFailedError as failure:
            floor["error"] = str(failure)
    missing = {name: VARIANTS[name].missing() for name in names}
    raw = interleave(missing, rounds, lambda name: passes("timing", size, name), console)
    summary = summarise(raw)
    for name, figures in summary.items():
        figures |= {key: raw[name]["rounds"][-1][key] for key in EXTRA}
        figures["floor"] = None if floor["error"] else floor_of(VARIANTS[name], floor)
    for name, figures in summary.items():
        figures |= ratios(name, summary)
    return {"parameters": SIZES[size].model.num_parameters, "floor": floor, "summary": summary, "raw": raw}


def ratios(name: str, summary: dict[str, Any]) -> dict[str, Any]:
    """Model FLOP/s against the best comparable row of each peer, against no offload, and time against the floor.

    Comparable is what clips if this clips, and accumulates as much. Without offload accumulation hardly matters.
    """
    ours, mine = VARIANTS[name], summary[name]
    alike = {other: VARIANTS[other] for other in summary if (VARIANTS[other].clip > 0) == (ours.clip > 0)}

    def best(wanted: Sequence[str]) -> float | None:
        return max((summary[other]["tflops"] for other in wanted), default=None)

    found: dict[str, float | None] = {
        label: best([o for o, v in alike.items() if v.engine == engine and v.accumulation == ours.accumulation])
        for label, engine in PEERS.items()
    }
    found["no offload"] = best([other for other, variant in alike.items() if variant.offload is None])
    against = {f"/{label}": None if value is None else mine["tflops"] / value for label, value in found.items()}
    return {**against, "/floor": mine["seconds"] / mine["floor"] if mine["floor"] else None}


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def offload_table(summary: dict[str, Any], title: str) -> Table:
    """Absolute figures, and ratios: above 1 is faster than the peer, slower than the floor."""
    table = Table(title=title, title_justify="left")
    table.add_column("variant", no_wrap=True)
    headings = ("s/step", "floor", "/floor", "TFLOP/s", "/no offload", "/DeepSpeed", "/FSDP2", "tokens/s", "GPU GiB")
    for heading in (*headings, "reserved", "host GiB", "host B/par", "machine B/par", "clipped", "last loss"):
        table.add_column(heading, justify="right")
    for name, figures in summary.items():
        memory = [figures[key] for key in ("peak_allocated", "peak_reserved", "rss_peak")]
        table.add_row(
            name,
            *(number(figures[key], 3) for key in ("seconds", "floor", "/floor")),
            number(figures["tflops"], 1),
            *(number(figures[key]) for key in ("/no offload", "/DeepSpeed", "/FSDP2")),
            number(figures["tokens_per_second"], 0),
            *(number(None if value is None else value / GIB) for value in memory),
            number(figures["host_bytes_per_parameter"], 1),
            number(figures["machine_bytes_per_parameter"], 1),
            "-" if figures["clip_rate"] is None else f"{figures['clip_rate']:.0%}",
            number(figures["loss"], 4),
        )
    return table


def tell_floor(floor: dict[str, Any], console: Console) -> None:
    """The parts of the floor, and the formulas."""
    if floor["error"] or "compute" not in floor:
        console.print(f"floor: {floor['error'] or 'not measured'}", highlight=False, markup=False)
        return
    rates = floor["rates"]
    bus = "no bus" if rates["bus"] is None else ", ".join(f"{k} {v / 1e9:.1f}" for k, v in rates["bus"].items())
    parts = ", ".join(f"{part} {floor[part]:.3f}" for part in ("forward", "backward", "compute"))
    update = f"update {floor['update']['fp32']:.3f}, with 8-bit moments {floor['update']['8bit']:.3f}"
    speed = f"{rates['update']['threads']} threads, {rates['update']['fp32'] * BYTES_UPDATED / 1e9:.0f} GB/s"
    console.print(f"floor, seconds: {parts}, {update} ({speed}; {rates['kernel']}), ", end="", highlight=False)
    console.print(f"bus {number(floor['bus'], 3)} (GB/s: {bus})", highlight=False)
    console.print("; ".join(f"{name}: {formula}" for name, formula in FORMULAS.items()), highlight=False)


def tell(size: str, found: dict[str, Any], console: Console) -> None:
    """The table of a size, what did not run and why, and the floor."""
    console.print(offload_table(found["summary"], f"{size}: {found['parameters'] / 1e6:.1f}M parameters"))
    for name, entry in found["raw"].items():
        note = entry["error"] or found["summary"].get(name, {}).get("note")
        if note:
            console.print(f"{name}: {note}", highlight=False, markup=False)
    tell_floor(found["floor"], console)


def timeline(path: Path, size: str, passes: Passes, console: Console) -> dict[str, Any]:
    """Profile the steps of ``DRAWN``; writes the picture and, beside it, the spans."""
    profiles: dict[str, Any] = {}
    for name in DRAWN:
        try:
            profiles[name] = passes("timeline", size, name)
        except RunFailedError as failure:
            console.print(f"timeline of {name}: {failure}", highlight=False, markup=False)
    if profiles:
        draw(profiles, path)
        path.with_suffix(".json").write_text(json.dumps(profiles, indent=1) + "\n")
        console.print(f"timeline: {path}", highlight=False)
    return {name: {key: found[key] for key in ("step_ms", "busy")} for name, found in profiles.items()}


def listed(known: dict[str, Any]) -> Any:
    """Names with commas between them, all known."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {name!r}; choose from {', '.join(known)}")
        return names

    return parse


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", type=listed(SIZES), default=["1b"], metavar="NAME,...", help=", ".join(SIZES))
    parser.add_argument("--only", type=listed(VARIANTS), default=[], metavar="NAME,...", help=", ".join(VARIANTS))
    parser.add_argument("--steps", type=int, default=0, help="timed steps per round (default 8; 13b: 4)")
    parser.add_argument("--rounds", type=int, default=1, help="interleaved rounds (default 1; 0 for a timeline only)")
    parser.add_argument("--without-floor", action="store_true", help="do not measure the floor")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--limit", type=float, default=0.0, help="seconds until a process is stopped (default: by size)"
    )
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for the whole run (default 540)")
    parser.add_argument("--timeline", default=None, metavar="PATH.png", help="also draw a step of the first size")
    parser.add_argument("--logs", type=Path, default=None, metavar="DIR", help="keep what every process wrote")
    parser.add_argument("--json", default=None, metavar="PATH", help="raw results; '-' for none (default results/)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep the raw figures."""
    args = parse_arguments(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device found; try: python -m benchmarks.offload --device cpu --size tiny")
    console = Console(width=max(Console().width, 200))
    passes = Passes(Runs("benchmarks.offload_worker", args.device, args.budget, args.logs), args)
    command = command_line("offload", argv)
    report: dict[str, Any] = {
        **circumstances(command, args.device),
        "formulas": FORMULAS,
        "sizes": {},
    }
    for size in args.size:
        found = measure_size(size, args.only or SIZES[size].variants, passes, console)
        report["sizes"][size] = found
        tell(size, found, console)
    console.print(told(report), highlight=False)
    if args.timeline:
        report["timeline"] = timeline(Path(args.timeline), args.size[0], passes, console)
    if path := keep(report, "offload", args.json):
        console.print(f"raw results: {path}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
