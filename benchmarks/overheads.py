"""One GPU, one rank: what features cost beside FSDP2. LoRA memory, compiled against eager, fp16 against bf16.

    python -m benchmarks.overheads [--only lora,compile,fp16] [--rounds 2] [--steps 6] [--out PATH]

The decoder of 1.345B parameters, 8 x 2048 tokens a step, clipping at 1.0, fused AdamW. Every variant runs once a round
in a process of its own, rounds interleaved. Processes are started one ahead: the next one imports while this one
measures, and touches the GPU only when its turn comes. Eager bf16 variants are measured once for the two parts that
need them. Compiler caches are empty in the first round and kept for each variant alone after that.

``--small --device cpu`` runs the same code anywhere, for its own sake and not for its numbers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.launch import RunFailedError, run_ranks, without_folders
from benchmarks.measure import machine, versions
from benchmarks.model import PRESETS
from benchmarks.overheads_worker import VARIANTS

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
EARLY_LOSSES = 3
LOSS_TOLERANCE = 0.01  # between losses of the first steps: two runs in bf16 differ by about 5e-4
MEMORY = ("peak_allocated", "peak_reserved", "rest_allocated")
RATIOS = ("seconds", "tflops", *MEMORY)
LARGE: dict[str, Any] = {"size": "large", "backend": "inductor", "rounds": 2, "steps": 6, "batch": 8, "match": ""}
SMALL: dict[str, Any] = {"size": "tiny", "backend": "aot_eager", "rounds": 1, "steps": 2, "batch": 2}
SMALL |= {"match": "checkpointed,bf16:,fp16:"}  # LoRA only with checkpointing
COMPILE_COLUMNS = {"graphs": "graphs", "breaks": "graph_breaks", "recompiles": "recompiles"}


@dataclass(frozen=True)
class Comparison:
    """Two variants whose figures are divided."""

    part: str
    ours: str
    against: str


def _comparisons() -> Iterator[Comparison]:
    for suffix in (":checkpointed", ""):
        for ours in ("shardwell3-gathered", "shardwell3-kept", "shardwell3"):
            for against in ("fsdp2-bf16", "fsdp2-fp32"):
                yield Comparison("lora", f"lora:{ours}{suffix}", f"lora:{against}{suffix}")
    for engine in ("fsdp2", "shardwell1", "shardwell3"):
        yield Comparison("compile", f"bf16:{engine}:compiled", f"bf16:{engine}")
    for ours in ("shardwell1", "shardwell3"):
        yield Comparison("compile", f"bf16:{ours}:compiled", "bf16:fsdp2:compiled")
        yield Comparison("compile", f"bf16:{ours}", "bf16:fsdp2")
    for precision in ("fp16", "bf16"):
        for ours in ("shardwell2", "shardwell3"):
            yield Comparison("fp16", f"{precision}:{ours}", f"{precision}:fsdp2")
    for engine in ("fsdp2", "shardwell2", "shardwell3"):
        yield Comparison("fp16", f"fp16:{engine}", f"bf16:{engine}")


COMPARISONS = tuple(_comparisons())
TITLES = {"lora": "LoRA, rank 16", "compile": "compiled and eager", "fp16": "fp16 and bf16"}


def names_of(part: str) -> list[str]:
    """The variants that a part compares, in the order of the table of variants."""
    wanted = {name for one in COMPARISONS if one.part == part for name in (one.ours, one.against)}
    return [name for name in VARIANTS if name in wanted]


@dataclass(frozen=True)
class Turn:
    """A process that has been started and waits until its signal says go or stop."""

    name: str
    signal: Path
    result: Future[list[dict[str, Any]]]


def start(name: str, number: int, folder: Path, pool: ThreadPoolExecutor, args: argparse.Namespace) -> Turn:
    """Start the process of a turn; ``folder`` holds its signal and the compiler cache of its variant."""
    signal = folder / f"{number}.signal"
    spec = {
        "variant": name,
        "size": args.size,
        "batch": args.batch,
        "steps": args.steps,
        "device": args.device,
        "backend": args.backend,
        "signal": str(signal),
        "cache": str(folder / name.replace(":", "-")),
    }
    limit = 2 * args.limit  # it may have to wait for a turn that uses up its own
    log = Path(args.logs, f"{number + 1}-{name.replace(':', '-')}.log") if args.logs else None
    work = pool.submit(run_ranks, "benchmarks.overheads_worker", spec, 1, limit, args.device, log)
    return Turn(name, signal, work)


def measure_all(names: Sequence[str], args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All rounds of all variants: raw figures by name, with the line that says why there are no more."""
    raw: dict[str, Any] = {name: {"rounds": [], "error": None} for name in names}
    order = [name for number in range(args.rounds) for name in (names if number % 2 == 0 else reversed(names))]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardwell-bench-") as folder, ThreadPoolExecutor(2) as pool:
        ahead = start(order[0], 0, Path(folder), pool, args) if order else None
        try:
            for number, name in enumerate(order, 1):
                turn = ahead
                ahead = start(order[number], number, Path(folder), pool, args) if number < len(order) else None
                assert turn is not None
                entry, elapsed = raw[name], time.monotonic() - begin
                if elapsed > args.budget and not entry["error"]:
                    entry["error"] = f"stopped: {args.budget:.0f} s were over before this turn"
                if entry["error"]:
                    turn.signal.write_text("stop")
                    continue
                console.print(f"[dim]{elapsed:4.0f} s  turn {number} of {len(order)}: {name}[/dim]", highlight=False)
                turn.signal.write_text("go")
                try:
                    entry["rounds"].append(turn.result.result()[0])
                except RunFailedError as failure:
                    entry["error"] = without_folders(str(failure))
                    console.print(f"{name}: {entry['error']}", highlight=False, markup=False)
        finally:
            if ahead is not None:
                ahead.signal.write_text("stop")
    return raw


def summarise(raw: dict[str, Any]) -> dict[str, Any]:
    """Medians over rounds for each variant that has figures; the most memory of any round; compilation of the first."""
    summary: dict[str, Any] = {}
    for name, entry in raw.items():
        rounds = entry["rounds"]
        if not rounds:
            continue
        figures = {key: statistics.median(one[key] for one in rounds) for key in ("seconds", "tflops")}
        for key in (*MEMORY, "rss_peak", "first_step_peak"):
            values = [one[key] for one in rounds if one[key] is not None]
            figures[key] = max(values) if values else None
        figures["first_step_seconds"] = [one["first_step_seconds"] for one in rounds]
        figures["early_losses"] = rounds[0]["losses"][:EARLY_LOSSES]
        figures["loss"] = rounds[0]["losses"][-1]
        for key in ("compile", "loss_scale", "skipped_steps"):
            if key in rounds[0]:
                figures[key] = rounds[0][key]
        summary[name] = figures
    return summary


def compared(summary: dict[str, Any], parts: Sequence[str]) -> list[dict[str, Any]]:
    """The ratios of each comparison whose two sides were measured, and how far their first losses are apart."""
    rows: list[dict[str, Any]] = []
    for one in COMPARISONS:
        ours, against = summary.get(one.ours), summary.get(one.against)
        if one.part not in parts or ours is None or against is None:
            continue
        row: dict[str, Any] = {"part": one.part, "variant": one.ours, "against": one.against}
        row |= {key: ours[key] / against[key] if ours[key] and against[key] else None for key in RATIOS}
        pairs = zip(ours["early_losses"], against["early_losses"], strict=True)
        row["loss_difference"] = max(abs(first - second) for first, second in pairs)
        row["losses_agree"] = row["loss_difference"] <= LOSS_TOLERANCE
        if "compile" in ours and "compile" not in against:
            row["compile_seconds"] = ours["first_step_seconds"][0] - against["first_step_seconds"][0]
        rows.append(row)
    return rows


def figures_table(part: str, summary: dict[str, Any]) -> Table:
    """Absolute figures of the variants of a part."""
    table = Table(title=TITLES[part], title_justify="left")
    table.add_column("variant", no_wrap=True)
    extra = {"compile": COMPILE_COLUMNS, "fp16": {"skipped": "skipped_steps"}}.get(part, {})
    headings = ("s/step", "TFLOP/s", "peak GiB", "reserved GiB", "rest GiB", "first step s", *extra, "last loss")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name in names_of(part):
        if name not in summary:
            continue
        figures = summary[name]
        found = {**figures, **figures.get("compile", {})}
        table.add_row(
            name,
            f"{figures['seconds']:.4f}",
            f"{figures['tflops']:.1f}",
            *("-" if figures[key] is None else f"{figures[key] / GIB:.2f}" for key in MEMORY),
            " ".join(f"{seconds:.1f}" for seconds in figures["first_step_seconds"]),
            *(str(found.get(key, "-")) for key in extra.values()),
            f"{figures['loss']:.4f}",
        )
    return table


def ratios_table(part: str, rows: Sequence[dict[str, Any]]) -> Table:
    """What the figures of one variant are in those of another."""
    table = Table(title=f"{TITLES[part]}: ratios", title_justify="left")
    table.add_column("variant", no_wrap=True)
    table.add_column("against", no_wrap=True)
    for heading in ("time", "TFLOP/s", "peak", "reserved", "rest", "compile s", "first losses apart"):
        table.add_column(heading, justify="right")
    for row in rows:
        apart = f"{row['loss_difference']:.1e}"
        table.add_row(
            row["variant"],
            row["against"],
            *("-" if row[key] is None else f"{row[key]:.3f}" for key in RATIOS),
            f"{row['compile_seconds']:.1f}" if "compile_seconds" in row else "-",
            apart if row["losses_agree"] else f"[red]{apart}[/red]",
        )
    return table


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overheads", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(TITLES), metavar="PART,...", help="some of lora, compile, fp16")
    parser.add_argument("--match", default=None, metavar="TEXT,...", help="variants whose name has one of these")
    parser.add_argument("--steps", type=int, default=None, help="timed steps per round (default 6; 2 if small)")
    parser.add_argument("--rounds", type=int, default=None, help="interleaved rounds (default 2; 1 if small)")
    parser.add_argument("--batch", type=int, default=None, help="sequences a step (default 8; 2 if small)")
    parser.add_argument("--small", action="store_true", help="a tiny decoder, and fewer variants")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until a turn is stopped (default 120)")
    parser.add_argument("--budget", type=float, default=440.0, help="no turn begins after so many s (default 440)")
    parser.add_argument("--logs", default=None, metavar="DIR", help="keep what each process prints")
    parser.add_argument("--out", default=None, metavar="PATH", help="raw results; '-' for none (default results/)")
    args = parser.parse_args(argv)
    args.parts = [part for part in args.only.split(",") if part]
    if unknown := [part for part in args.parts if part not in TITLES]:
        parser.error(f"--only {','.join(unknown)}: choose from {', '.join(TITLES)}")
    defaults = SMALL if args.small else LARGE
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    return args


def command_line(args: argparse.Namespace) -> str:
    """The command that repeats this run; where its results went is left out."""
    words = ["python -m benchmarks.overheads --only", ",".join(args.parts)]
    words += [f"--{name} {getattr(args, name)}" for name in ("rounds", "steps", "batch")]
    words += [f"--match {args.match}"] if args.match else []
    words += ["--small"] if args.small else []
    return " ".join(words if args.device == "cuda" else [*words, "--device", args.device])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep the raw figures."""
    args = parse_arguments(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device found; try: python -m benchmarks.overheads --small --device cpu")
    console = Console(width=max(Console().width, 150))
    matching = [name for name in VARIANTS if any(text in name for text in args.match.split(","))]
    wanted = {name for part in args.parts for name in names_of(part)}
    if args.logs:
        Path(args.logs).mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    raw = measure_all([name for name in matching if name in wanted], args, console)
    summary = summarise(raw)
    rows = compared(summary, args.parts)
    on = {**machine(), "device": torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu"}
    report: dict[str, Any] = {
        "command": command_line(args),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": on,
        "versions": versions(),
        "parameters": PRESETS[args.size].num_parameters,
        "wall_seconds": time.monotonic() - begin,
        "ratios": rows,
        "summary": summary,
        "raw": raw,
    }
    for part in args.parts:
        console.print(figures_table(part, summary))
        console.print(ratios_table(part, [row for row in rows if row["part"] == part]))
    for name, entry in raw.items():
        if entry["error"]:
            console.print(f"{name}: {entry['error']}", highlight=False, markup=False)
    found = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    console.print(f"{on['device']}; {on['cpu']}, {on['cores']} cores; {found}", highlight=False)
    if args.out != "-":
        path = Path(args.out) if args.out else RESULTS / f"overheads-{report['date'][:10]}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"raw results: {path}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
