"""Codecs for what travels: bytes read and written in a second, beside what a copy reads and writes.

    python -m benchmarks.codec [--device cpu] [--numel 67108864] [--threads 1,2] [--rounds 10] [--out PATH]

Each kind encodes and decodes rows of bf16 and fp32, and sums up messages of as many ranks as `--messages` says. The
copy is one of fp32 numbers: the library's in host memory, torch's on a GPU.

The elements lie in 16 slices. Contenders take turns, each on another slice, so that none finds its own in the caches
and each call is short: on a machine that does other work as well, some calls are then left alone. The tenth percentile
of a contender's calls is what counts; medians are kept beside it. On a GPU each turn is a call for every slice, one
behind the other, and the GPU is kept waiting until the host has started all of them: what that takes does not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import circumstances, keep, told
from shardwell import kernels
from shardwell.kernels.quantize import Codec, Kind

COPY = "copy"
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NUM_SLICES = 16
CYCLES_AHEAD = 6_000_000  # of a GPU: 3 ms or more, in which the host starts as many kernels as there are slices


@dataclass(frozen=True)
class Contender:
    """A call for each slice, and the bytes that it must read and write."""

    calls: list[Callable[[], None]]
    num_bytes: int


class Slice:
    """Rows of numbers, and messages with their codes."""

    def __init__(self, numel: int, messages: int, device: str) -> None:
        self.wide = torch.randn(numel, device=device)
        self.out = torch.zeros_like(self.wide)
        self.values = {name: self.wide.to(dtype) for name, dtype in TYPES.items()}
        self.data: dict[Kind, torch.Tensor] = {}
        for kind in get_args(Kind):
            size = Codec(kind).num_bytes(numel)
            self.data[kind] = torch.empty(messages, size, dtype=torch.uint8, device=device)
            for message in self.data[kind]:
                Codec(kind).encode(self.wide, message)

    def copy(self) -> None:
        library = kernels.compiled()
        if self.wide.is_cuda or library is None:
            self.out.copy_(self.wide)
        else:
            library.stream(self.out, self.wide, None, torch.get_num_threads())


def encoding(part: Slice, kind: Kind, name: str) -> Callable[[], None]:
    return lambda: Codec(kind).encode(part.values[name], part.data[kind][0])


def decoding(part: Slice, kind: Kind, name: str) -> Callable[[], None]:
    return lambda: Codec(kind).decode(part.data[kind][0], part.values[name])


def summing(part: Slice, kind: Kind) -> Callable[[], None]:
    return lambda: Codec(kind).decode_sum(part.data[kind], part.out, 1 / len(part.data[kind]))


def contenders_over(slices: list[Slice]) -> dict[str, Contender]:
    first = slices[0]
    found = {COPY: Contender([part.copy for part in slices], 2 * first.wide.nbytes)}
    for kind, data in first.data.items():
        for name, values in first.values.items():
            size = values.nbytes + data[0].nbytes
            found[f"{kind}, encode {name}"] = Contender([encoding(part, kind, name) for part in slices], size)
            found[f"{kind}, decode {name}"] = Contender([decoding(part, kind, name) for part in slices], size)
        found[f"{kind}, sum of {len(data)}"] = Contender(
            [summing(part, kind) for part in slices], first.out.nbytes + data.nbytes
        )
    return found


def host_seconds(contender: Contender, turn: int) -> float:
    begin = time.perf_counter()
    contender.calls[turn % NUM_SLICES]()
    return time.perf_counter() - begin


def gpu_seconds(contender: Contender, turn: int) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CYCLES_AHEAD)
    first.record()
    for call in contender.calls:
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / len(contender.calls)


def measure(contenders: dict[str, Contender], rounds: int, on_gpu: bool) -> dict[str, list[float]]:
    """Seconds of each call. Each contender works one slice ahead of the one before it."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-NUM_SLICES, rounds * NUM_SLICES):  # the first round warms up
        for place, (name, contender) in enumerate(contenders.items()):
            found = gpu_seconds(contender, turn) if on_gpu else host_seconds(contender, turn + place)
            if turn >= 0:
                seconds[name].append(found)
    return seconds


def summarise(contenders: dict[str, Contender], seconds: dict[str, list[float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, times in seconds.items():
        tenth, size = statistics.quantiles(times, n=10)[0], contenders[name].num_bytes
        figures[name] = {
            "tenth_percentile_seconds": tenth,
            "median_seconds": statistics.median(times),
            "gigabytes_per_second": size / tenth / 1e9,
        }
    for one in figures.values():
        one["share_of_copy"] = one["gigabytes_per_second"] / figures[COPY]["gigabytes_per_second"]
    return figures


def table_of(title: str, figures: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in ("10% ms", "median ms", "GB/s", "of a copy's"):
        table.add_column(heading, justify="right")
    for name, one in figures.items():
        table.add_row(
            name,
            f"{one['tenth_percentile_seconds'] * 1e3:.3f}",
            f"{one['median_seconds'] * 1e3:.3f}",
            f"{one['gigabytes_per_second']:.1f}",
            f"{one['share_of_copy']:.2f}",
        )
    return table


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--numel", type=int, default=0, help="much more than the caches hold (default 2^26, GPU 2^30)")
    parser.add_argument("--messages", type=int, default=4, help="that are summed up (default 4)")
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}", metavar="N,...", help="(default: 1 and all)")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds over all slices (default 10)")
    parser.add_argument("--out", default=None, metavar="PATH", help="raw results; '-' for none (default results/)")
    args = parser.parse_args(argv)
    args.numel = args.numel or (2**30 if args.device == "cuda" else 2**26)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep the raw figures."""
    args, console = parse_arguments(argv), Console(width=max(Console().width, 110))
    torch.manual_seed(0)
    numel, on_gpu = args.numel // NUM_SLICES, args.device == "cuda"
    contenders = contenders_over([Slice(numel, args.messages, args.device) for _ in range(NUM_SLICES)])
    told_by = f"--device {args.device} --numel {args.numel} --messages {args.messages} --rounds {args.rounds}"
    report = circumstances(f"python -m benchmarks.codec {told_by} --threads {args.threads}", args.device)
    report |= {"kernels": "Triton" if on_gpu else str(kernels.describe()), "threads": {}}
    for threads in [1] if on_gpu else map(int, args.threads.split(",")):
        torch.set_num_threads(threads)
        load = os.getloadavg()[0]
        seconds = measure(contenders, args.rounds, on_gpu)
        figures = summarise(contenders, seconds)
        report["threads"][threads] = {"load": [load, os.getloadavg()[0]], "summary": figures, "raw": seconds}
        where = "on the GPU" if on_gpu else f"{threads} thread(s)"
        console.print(table_of(f"codecs, {numel / 1e6:.1f}M elements a call, {where}", figures))
    console.print(f"{told(report)}; {report['kernels']}, load {os.getloadavg()[0]:.1f}", highlight=False)
    if (path := keep(report, f"codec-{args.device}", args.out)) is not None:
        console.print(f"raw results: {path}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
