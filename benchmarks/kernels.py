"""AdamW in host memory: the compiled kernel beside torch's and DeepSpeed's, and beside what memory can do.

    python -m benchmarks.kernels [--numel 67108864] [--threads 1,2] [--rounds 10] [--out PATH]

The job is that of an offloaded step: a bf16 gradient comes in, fp32 master and moments are updated, a bf16 parameter
goes out. Where a contender takes fp32 gradients or leaves fp32 parameters, its casts are counted. Bandwidth is the best
of three loops of the library: copy, triad, scale in place.

The elements lie in 16 slices. Contenders take turns, each on another slice, so that none finds its own in the caches
and each call is short: on a machine that does other work as well, some calls are then left alone. The tenth percentile
of a contender's calls is what counts; medians are kept beside it.
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
from shardwell import kernels
from shardwell.kernels.library import Library, find

RESULTS = Path(__file__).parent / "results"
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
OURS, FUSED, DEEPSPEED = "shardwell", "torch fused + casts", "DeepSpeedCPUAdam + casts"
STREAMS = {"copy": 8, "triad": 12, "scale in place": 8}  # bytes for each element
NUM_SLICES = 16
TARGETS = {FUSED: 1.5, DEEPSPEED: 1.0, "bandwidth": 0.85}


@dataclass(frozen=True)
class Contender:
    """A call for each slice, and the bytes that it must read and write for each element (none: not a fixed number)."""

    calls: list[Callable[[int], None]]  # with the number of threads
    bytes_per_element: int | None = None


class Slice:
    """What all contenders step."""

    def __init__(self, numel: int) -> None:
        self.master = torch.nn.Parameter(torch.randn(numel) * 0.02)
        self.first, self.second = torch.randn(numel) * 1e-3, torch.rand(numel) * 1e-6
        self.wide = torch.randn(numel) * 1e-3
        self.gradient = self.wide.bfloat16()
        self.out = torch.zeros(numel, dtype=torch.bfloat16)
        self.moments = kernels.Moments8bitArgs.zeros(numel)
        self.new = kernels.OutOfPlaceState(torch.zeros(numel), (torch.zeros(numel), torch.zeros(numel)))
        self.steps = 0
        self.master.grad = self.wide

    def state(self, step: Any) -> dict[str, Any]:
        return {"step": step, "exp_avg": self.first, "exp_avg_sq": self.second}

    def stretches(self) -> dict[str, kernels.UpdateArgs]:
        """The whole job, out of place, with 8-bit moments; and a step with an fp32 gradient and no 16-bit copy."""
        master, state = self.master.detach(), (self.first, self.second)
        return {
            OURS: kernels.UpdateArgs(self.gradient, master, state, out=self.out),
            f"{OURS}, out of place": kernels.UpdateArgs(self.gradient, master, state, out=self.out, new=self.new),
            f"{OURS}, 8-bit moments": kernels.UpdateArgs(self.gradient, master, self.moments, out=self.out),
            f"{OURS}, step alone": kernels.UpdateArgs(self.wide, master, state),
        }

    def optimizers(self) -> dict[str, Any]:
        """Torch's, and DeepSpeed's if it is installed."""
        made: dict[str, Any] = {}
        for how in ("fused", "foreach"):
            made[f"torch {how}"] = torch.optim.AdamW([self.master], **OPTIONS, **{how: True})
            made[f"torch {how}"].state[self.master] = self.state(torch.tensor(1.0))
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam
        except ImportError:
            return made
        made["DeepSpeedCPUAdam"] = DeepSpeedCPUAdam([self.master], **OPTIONS, adamw_mode=True)
        made["DeepSpeedCPUAdam"].state[self.master] = self.state(1)
        return made


def kernel(part: Slice, stretch: kernels.UpdateArgs, library: Library) -> Callable[[int], None]:
    def step(threads: int) -> None:
        part.steps += 1
        library.update(kernels.AdamRule(**OPTIONS, decoupled=True, step=part.steps), stretch, threads)

    return step


def with_casts(part: Slice, optimizer: Any) -> Callable[[int], None]:
    def step(threads: int) -> None:
        part.wide.copy_(part.gradient)
        optimizer.step()
        with torch.no_grad():
            part.out.copy_(part.master)

    return step


def streaming(name: str, part: Slice, library: Library) -> Callable[[int], None]:
    source = part.wide if name == "scale in place" else part.first
    other = part.second if name == "triad" else None

    def call(threads: int) -> None:
        library.stream(part.wide, source, other, threads)

    return call


def contenders_over(slices: list[Slice], library: Library) -> dict[str, Contender]:
    stretches, optimizers = [part.stretches() for part in slices], [part.optimizers() for part in slices]
    found = {}
    for name in stretches[0]:
        calls = [kernel(part, each[name], library) for part, each in zip(slices, stretches, strict=True)]
        found[name] = Contender(calls, 16 if "8-bit" in name else 28)
    for name in optimizers[0]:
        mine = [each[name] for each in optimizers]
        casts = [with_casts(part, optimizer) for part, optimizer in zip(slices, mine, strict=True)]
        found[f"{name} + casts"] = Contender(casts)
        found[f"{name}, step alone"] = Contender([lambda threads, one=one: one.step() for one in mine])
    for name, size in STREAMS.items():
        found[name] = Contender([streaming(name, part, library) for part in slices], size)
    return found


def measure(contenders: dict[str, Contender], threads: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call. Each contender works one slice ahead of the one before it."""
    torch.set_num_threads(threads)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-NUM_SLICES, rounds * NUM_SLICES):  # the first round warms up
        for place, (name, contender) in enumerate(contenders.items()):
            call = contender.calls[(turn + place) % NUM_SLICES]
            begin = time.perf_counter()
            call(threads)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def summarise(contenders: dict[str, Contender], seconds: dict[str, list[float]], numel: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    tenth = {name: statistics.quantiles(times, n=10)[0] for name, times in seconds.items()}
    median = {name: statistics.median(times) for name, times in seconds.items()}
    for name in seconds:
        size = contenders[name].bytes_per_element
        figures[name] = {
            "tenth_percentile_seconds": tenth[name],
            "median_seconds": median[name],
            "speedup": tenth[name] / tenth[OURS],
            "median_speedup": median[name] / median[OURS],
            "gigabytes_per_second": None if size is None else size * numel / tenth[name] / 1e9,
        }
    bandwidth = max(figures[name]["gigabytes_per_second"] for name in STREAMS)
    shares = {FUSED: figures[FUSED]["speedup"], "bandwidth": figures[OURS]["gigabytes_per_second"] / bandwidth}
    if DEEPSPEED in figures:
        shares[DEEPSPEED] = figures[DEEPSPEED]["speedup"]
    reached = {name: {"target": TARGETS[name], "found": value} for name, value in shares.items()}
    return {"contenders": figures, "bandwidth": bandwidth, "targets": reached}


def table_of(threads: int, numel: int, summary: dict[str, Any]) -> Table:
    table = Table(title=f"AdamW, {numel / 1e6:.1f}M elements a call, {threads} thread(s)", title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in ("10% ms", "median ms", "kernel is faster by", "by the median", "GB/s"):
        table.add_column(heading, justify="right")
    for name, one in summary["contenders"].items():
        table.add_row(
            name,
            f"{one['tenth_percentile_seconds'] * 1e3:.2f}",
            f"{one['median_seconds'] * 1e3:.2f}",
            f"{one['speedup']:.2f}",
            f"{one['median_speedup']:.2f}",
            "-" if one["gigabytes_per_second"] is None else f"{one['gigabytes_per_second']:.1f}",
        )
    return table


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--numel", type=int, default=2**26, help="elements; much more than the caches hold")
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}", metavar="N,...", help="(default: 1 and all)")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds over all slices (default 10)")
    parser.add_argument("--isa", default=None, choices=("scalar", "avx2", "avx512"), help="(default: the best)")
    parser.add_argument("--out", default=None, metavar="PATH", help="raw results; '-' for none (default results/)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep the raw figures."""
    args = parse_arguments(argv)
    library, console = Library(find(kernels.__path__), args.isa), Console(width=max(Console().width, 110))
    torch.manual_seed(0)
    numel = args.numel // NUM_SLICES
    contenders = contenders_over([Slice(numel) for _ in range(NUM_SLICES)], library)
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
        summary = summarise(contenders, seconds, numel)
        report["threads"][threads] = {"load": [load, os.getloadavg()[0]], "summary": summary, "raw": seconds}
        console.print(table_of(threads, numel, summary))
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
