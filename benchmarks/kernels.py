"""AdamW in host memory: the compiled kernel beside torch's and DeepSpeed's, and beside what memory can do.

    python -m benchmarks.kernels [--numel 67108864] [--threads 1,2] [--rounds 15] [--out PATH]

The job is that of an offloaded step: a bf16 gradient comes in, fp32 master and moments are updated, a bf16 parameter
goes out. Where a contender takes fp32 gradients or leaves fp32 parameters, its casts are counted. All contenders step
the same tensors in turn, once a round. The best of all rounds counts, because other work on the machine can only add
to a time; medians are kept beside it. Bandwidth is the best of three loops of the library: copy, triad, scale in place.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import machine, versions
from shardwell import native
from shardwell.native.library import Library, find

RESULTS = Path(__file__).parent / "results"
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
OURS, FUSED, DEEPSPEED = "shardwell", "torch fused + casts", "DeepSpeedCPUAdam + casts"
TARGETS = {FUSED: 1.5, DEEPSPEED: 1.0, "bandwidth": 0.85}


@dataclass(frozen=True)
class Contender:
    """A call, and the bytes that it must read and write for each element (none: not a fixed number)."""

    call: Callable[[int], None]  # with the number of threads
    bytes_per_element: int | None = None


class Tensors:
    """What all contenders step."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(0)
        self.master = torch.nn.Parameter(torch.randn(numel) * 0.02)
        self.first, self.second = torch.randn(numel) * 1e-3, torch.rand(numel) * 1e-6
        self.wide = torch.randn(numel) * 1e-3
        self.gradient = self.wide.bfloat16()
        self.out = torch.zeros(numel, dtype=torch.bfloat16)
        self.moments = native.Moments8.zeros(numel)
        self.steps = 0

    def state(self, step: Any) -> dict[str, Any]:
        return {"step": step, "exp_avg": self.first, "exp_avg_sq": self.second}


def ours(tensors: Tensors, library: Library) -> dict[str, Contender]:
    """The whole job, the same with 8-bit moments, and a step with an fp32 gradient that writes no 16-bit copy."""
    master, state = tensors.master.detach(), (tensors.first, tensors.second)
    stretches = {
        OURS: (native.Stretch(tensors.gradient, master, state, out=tensors.out), 28),
        f"{OURS}, 8-bit moments": (native.Stretch(tensors.gradient, master, tensors.moments, out=tensors.out), 16),
        f"{OURS}, step alone": (native.Stretch(tensors.wide, master, state), 28),
    }

    def stepping(stretch: native.Stretch) -> Callable[[int], None]:
        def step(threads: int) -> None:
            tensors.steps += 1
            library.update(native.Adam(**OPTIONS, decoupled=True, step=tensors.steps), stretch, threads)

        return step

    return {name: Contender(stepping(stretch), size) for name, (stretch, size) in stretches.items()}


def others(tensors: Tensors) -> dict[str, Contender]:
    """Optimizers of an fp32 parameter: with casts, and the step alone."""
    made: dict[str, Any] = {}
    for how in ("fused", "foreach"):
        made[f"torch {how}, step alone"] = torch.optim.AdamW([tensors.master], **OPTIONS, **{how: True})
        made[f"torch {how}, step alone"].state[tensors.master] = tensors.state(torch.tensor(1.0))
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        pass
    else:
        made["DeepSpeedCPUAdam, step alone"] = DeepSpeedCPUAdam([tensors.master], **OPTIONS, adamw_mode=True)
        made["DeepSpeedCPUAdam, step alone"].state[tensors.master] = tensors.state(1)
    tensors.master.grad = tensors.wide
    contenders = {}
    for name, optimizer in made.items():
        contenders[name.replace(", step alone", " + casts")] = Contender(with_casts(optimizer, tensors))
        contenders[name] = Contender(lambda threads, optimizer=optimizer: optimizer.step())
    return contenders


def with_casts(optimizer: Any, tensors: Tensors) -> Callable[[int], None]:
    def step(threads: int) -> None:
        tensors.wide.copy_(tensors.gradient)
        optimizer.step()
        with torch.no_grad():
            tensors.out.copy_(tensors.master)

    return step


def streams(tensors: Tensors, library: Library) -> dict[str, Contender]:
    first, second, out = tensors.first, tensors.second, tensors.wide
    return {
        "copy": Contender(lambda threads: library.stream(out, first, None, threads), 8),
        "triad": Contender(lambda threads: library.stream(out, first, second, threads), 12),
        "scale in place": Contender(lambda threads: library.stream(out, out, None, threads), 8),
    }


def measure(contenders: dict[str, Contender], threads: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call. Every second round goes backwards."""
    torch.set_num_threads(threads)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender.call(threads)
    for number in range(rounds):
        for name in contenders if number % 2 == 0 else reversed(contenders):
            begin = time.perf_counter()
            contenders[name].call(threads)
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def summarise(contenders: dict[str, Contender], seconds: dict[str, list[float]], numel: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, times in seconds.items():
        per_element = contenders[name].bytes_per_element
        figures[name] = {
            "best_seconds": min(times),
            "median_seconds": statistics.median(times),
            "best_speedup": min(times) / min(seconds[OURS]),
            "median_speedup": statistics.median(b / a for a, b in zip(seconds[OURS], times, strict=True)),
            "gigabytes_per_second": None if per_element is None else per_element * numel / min(times) / 1e9,
        }
    bandwidth = max(figures[name]["gigabytes_per_second"] for name in ("copy", "triad", "scale in place"))
    shares = {FUSED: figures[FUSED]["best_speedup"], "bandwidth": figures[OURS]["gigabytes_per_second"] / bandwidth}
    if DEEPSPEED in figures:
        shares[DEEPSPEED] = figures[DEEPSPEED]["best_speedup"]
    reached = {name: {"target": TARGETS[name], "found": value} for name, value in shares.items()}
    return {"contenders": figures, "bandwidth": bandwidth, "targets": reached}


def table_of(threads: int, numel: int, summary: dict[str, Any]) -> Table:
    table = Table(title=f"AdamW, {numel / 1e6:.0f}M elements, {threads} thread(s)", title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in ("best ms", "median ms", "kernel is faster by", "by the median", "GB/s"):
        table.add_column(heading, justify="right")
    for name, one in summary["contenders"].items():
        table.add_row(
            name,
            f"{one['best_seconds'] * 1e3:.1f}",
            f"{one['median_seconds'] * 1e3:.1f}",
            f"{one['best_speedup']:.2f}",
            f"{one['median_speedup']:.2f}",
            "-" if one["gigabytes_per_second"] is None else f"{one['gigabytes_per_second']:.1f}",
        )
    return table


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--numel", type=int, default=2**26, help="elements; choose more than the caches hold")
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}", metavar="N,...", help="(default: 1 and all)")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (default 15)")
    parser.add_argument("--isa", default=None, choices=("scalar", "avx2", "avx512"), help="(default: the best)")
    parser.add_argument("--out", default=None, metavar="PATH", help="raw results; '-' for none (default results/)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep the raw figures."""
    args = parse_arguments(argv)
    library, console = Library(find(native.__path__), args.isa), Console(width=max(Console().width, 110))
    tensors = Tensors(args.numel)
    contenders = {
        **ours(tensors, library),
        **others(tensors),
        **streams(tensors, library),
    }
    report: dict[str, Any] = {
        "command": f"python -m benchmarks.kernels --numel {args.numel} --threads {args.threads} --rounds {args.rounds}",
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "isa": library.isa,
        "threads": {},
    }
    for threads in map(int, args.threads.split(",")):
        load = os.getloadavg()[0]
        seconds = measure(contenders, threads, args.rounds)
        summary = summarise(contenders, seconds, args.numel)
        report["threads"][threads] = {"load": [load, os.getloadavg()[0]], "summary": summary, "raw": seconds}
        console.print(table_of(threads, args.numel, summary))
        for name, one in summary["targets"].items():
            verdict = "reached" if one["found"] >= one["target"] else "missed"
            console.print(f"{name}: {one['found']:.2f}, target {one['target']:.2f}: {verdict}", highlight=False)
    on = report["machine"]
    console.print(f"{on['cpu']}, {on['cores']} cores, {library.isa}, load {os.getloadavg()[0]:.1f}", highlight=False)
    if args.out != "-":
        path = Path(args.out) if args.out else RESULTS / f"kernels-{report['date'][:10]}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"raw results: {path}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
