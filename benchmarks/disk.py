"""Reads and writes between memory and a drive: the disk tier beside the drive's own speed and DeepSpeed's DeepNVMe.

    python -m benchmarks.disk --path DIRECTORY [--bytes 1073741824] [--rounds 10] [--slices 8] [--out PATH]

Jobs: write, read, and read one half while the other is written. The reference is fio, where it is installed, else a
loop of its own (threads that call preadv and pwritev on an O_DIRECT descriptor). All have the same drive, block size,
blocks in flight, file size and memory (fio has memory of its own). The tier and DeepSpeed are given requests of 16 MiB,
all at once.

The file lies in 8 slices. Contenders take turns, in another order each time, each with a job over a slice: on a machine
that does other work as well, some calls are then left alone. The tenth percentile of a contender's calls is what
counts; medians are kept beside it. fio starts anew for each call, so a few large slices are fairer to it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measure import cpu_seconds, machine, versions
from shardwell import kernels
from shardwell.offload.disk import AioSettings, DiskExtent, DiskTier, DiskTransfer, aligned
from shardwell.offload.disk_file import file_system, rounded
from shardwell.offload.disk_queue import ENGINES, choose, unusable

RESULTS = Path(__file__).parent / "results"
JOBS = ("write", "read", "mixed")
REFERENCE, FIO, DEEPSPEED = "preadv and pwritev in threads", "fio", "DeepSpeed DeepNVMe"
REQUEST = 16 << 20
PIECE, NUM_THREADS = 4 << 20, 16  # of plain threads
TARGET = 0.90

Piece = tuple[bool, int, int]  # whether it is written, from where, to where


class Contender(Protocol):
    """Does a job over a slice of its file."""

    def run(self, job: str, start: int, end: int) -> None: ...

    def close(self) -> None: ...


def pieces(job: str, start: int, end: int, size: int) -> list[Piece]:
    """A job in pieces; a mixed one reads the first half and writes the second, in turn."""
    if job != "mixed":
        return [(job == "write", at, min(at + size, end)) for at in range(start, end, size)]
    half = (end - start) // 2
    both = [(at, min(at + size, start + half)) for at in range(start, start + half, size)]
    return [(is_write, at + half * is_write, to + half * is_write) for at, to in both for is_write in (False, True)]


class Loop:
    """The reference: nothing but threads and system calls. Shares no code with the tier."""

    def __init__(self, path: Path, memory: Tensor, settings: AioSettings) -> None:
        self._memory = memoryview(memory.numpy())
        self._settings = settings
        self._file = os.open(path, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, memory.numel())

    def run(self, job: str, start: int, end: int) -> None:
        rest, lock = iter(pieces(job, start, end, self._settings.block_size)), threading.Lock()
        wrong: list[Piece] = []

        def work() -> None:
            while True:
                with lock:
                    piece = next(rest, None)
                if piece is None:
                    return
                is_write, at, to = piece
                call = os.pwritev if is_write else os.preadv
                if call(self._file, [self._memory[at:to]], at) != to - at:
                    wrong.append(piece)

        threads = [threading.Thread(target=work) for _ in range(self._settings.queue_depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if wrong:
            raise OSError(f"not moved: {wrong}")

    def close(self) -> None:
        os.close(self._file)


class Tier:
    """The disk tier with one engine."""

    def __init__(self, path: Path, memory: Tensor, settings: AioSettings) -> None:
        self._memory = memory
        self._tier = DiskTier([path], settings)
        self._extent = self._tier.allocate(memory.numel())

    def run(self, job: str, start: int, end: int) -> None:
        tickets = []
        for is_write, at, to in pieces(job, start, end, REQUEST):
            move = self._tier.write if is_write else self._tier.read
            tickets.append(move(self._extent, at, self._memory[at:to]))
        for ticket in tickets:
            ticket.wait()

    def close(self) -> None:
        self._tier.close()


class DeepNvme:
    """DeepSpeed's handle, with memory that it locked itself, which it moves without a copy."""

    def __init__(self, path: Path, memory: Tensor, settings: AioSettings) -> None:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        keys = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
        self._handle = AsyncIOBuilder().load(verbose=False).aio_handle(*(getattr(settings, key) for key in keys))
        self._source = memory
        self._memory = self._handle.new_cpu_locked_tensor(memory.numel(), torch.empty(0, dtype=torch.uint8))
        self._memory.copy_(memory)
        self._name = path / f"deepspeed-{os.getpid()}.bin"
        self._name.touch(0o600)
        with self._name.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, memory.numel())

    def run(self, job: str, start: int, end: int) -> None:
        for is_write, at, to in pieces(job, start, end, REQUEST):
            move = self._handle.async_pwrite if is_write else self._handle.async_pread
            move(self._memory[at:to], str(self._name), at)
        self._handle.wait()

    def close(self) -> None:
        self._name.unlink()
        self._handle.free_cpu_locked_tensor(self._memory)


class Fio:
    """The tool that drives are measured with. Says itself how fast it was."""

    seconds: float

    def __init__(self, path: Path, memory: Tensor, settings: AioSettings) -> None:
        self._name = path / f"fio-{os.getpid()}.bin"
        engine = "psync" if "io_uring" in unusable() else "io_uring"
        depth = settings.queue_depth
        self._call = [
            "fio",
            "--name=reference",
            f"--filename={self._name}",
            f"--bs={settings.block_size}",
            f"--ioengine={engine}",
            f"--iodepth={depth}",
            "--direct=1",
            "--output-format=json",
        ]
        self.run("write", 0, memory.numel())

    def run(self, job: str, start: int, end: int) -> None:
        kind = {"read": "read", "write": "write", "mixed": "rw"}[job]
        call = [*self._call, f"--rw={kind}", f"--offset={start}", f"--size={end - start}"]
        done = subprocess.run(call, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)["jobs"][0]
        self.seconds = (end - start) / (found["read"]["bw_bytes"] + found["write"]["bw_bytes"])

    def close(self) -> None:
        self._name.unlink(missing_ok=True)


@contextlib.contextmanager
def contenders_on(path: Path, memory: Tensor, settings: AioSettings) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Those that run here, and why the others do not."""
    makers: dict[str, Callable[[], Contender]] = {REFERENCE: lambda: Loop(path, memory, settings)}
    missing = {f"shardwell, {engine}": reason for engine, reason in unusable().items()}
    if shutil.which("fio"):
        makers[FIO] = lambda: Fio(path, memory, settings)
    else:
        missing[FIO] = "not installed"
    for engine in ENGINES:
        if (name := f"shardwell, {engine}") not in missing:
            chosen = AioSettings(**{**vars(settings), "engine": engine})
            makers[name] = lambda chosen=chosen: Tier(path, memory, chosen)  # type: ignore[misc]
    makers[DEEPSPEED] = lambda: DeepNvme(path, memory, settings)
    made: dict[str, Any] = {}
    try:
        for name, make in makers.items():
            try:
                made[name] = make()
            except Exception as error:  # whatever a peer raises belongs in its row
                if name != DEEPSPEED:
                    raise
                missing[name] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        yield made, missing
    finally:
        for contender in made.values():
            contender.close()


def drive_rates(path: Path, settings: AioSettings, num_bytes: int) -> dict[str, float]:
    """Bytes a second of each job, reads and writes together: the best of the reference and the chosen engine."""
    memory = aligned(num_bytes)
    pattern = torch.randint(256, (min(num_bytes, REQUEST),), dtype=torch.uint8)
    for at in range(0, num_bytes, REQUEST):
        memory[at : at + REQUEST] = pattern[: num_bytes - at]
    found: dict[str, float] = dict.fromkeys(JOBS, 0.0)
    for make in (Loop, Tier):
        with contextlib.suppress(OSError):  # a file system that has no direct access is left to the tier
            contender: Contender = make(path, memory, settings)
            try:
                for job in ("write", "read", *["mixed"] * 3):  # written first: what nobody wrote is no work to read
                    begin = time.perf_counter()
                    contender.run(job, 0, num_bytes)
                    found[job] = max(found[job], num_bytes / (time.perf_counter() - begin))
            finally:
                contender.close()
    return found


def rewritten_rate(tier: DiskTier, extents: Sequence[DiskExtent], seconds: float) -> float:
    """Bytes a second that the drive keeps up for so long if what is read is written back soon after, over and over."""
    depth, lag = 32, 16
    memory, written = aligned(depth * REQUEST).zero_(), deque[DiskTransfer]()  # there is none until it is touched
    places = [(extent, at) for extent in extents for at in range(0, extent.num_bytes, REQUEST)]
    read, total, begin = deque[tuple[DiskExtent, int, Tensor, DiskTransfer]](), 0, time.perf_counter()

    def write_back() -> None:
        extent, at, slot, transfer = read.popleft()
        transfer.wait()
        written.append(tier.write(extent, at, slot))

    for turn, (extent, at) in enumerate(itertools.cycle(places)):
        if time.perf_counter() > begin + seconds:
            break
        if len(written) == depth - lag:
            written.popleft().wait()
        slot = memory[turn % depth * REQUEST :][: min(REQUEST, extent.num_bytes - at)]
        read.append((extent, at, slot, tier.read(extent, at, slot)))
        if len(read) == lag or len(read) == len(places):
            write_back()
        total += 2 * slot.numel()
    while read:
        write_back()
    for transfer in written:
        transfer.wait()
    return total / (time.perf_counter() - begin)


def rewritten_by_threads(tier: DiskTier, extents: Sequence[DiskExtent], seconds: float) -> float:
    """The same by threads that do nothing but read a piece of the tier's files and write it back."""
    pieces = [
        (tier._files[lane].descriptor, at, rounded(size))
        for extent in extents
        for start in range(0, extent.num_bytes, PIECE)
        for lane, at, _, size in extent.places(start, min(PIECE, extent.num_bytes - start))
    ]
    lock, moved, begin = threading.Lock(), list[int](), time.perf_counter()
    rest = itertools.cycle(pieces)
    num_threads = min(NUM_THREADS, len(pieces))  # no piece is in two hands at a time

    def work() -> None:
        memory = memoryview(aligned(PIECE).zero_().numpy())
        while time.perf_counter() < begin + seconds:
            with lock:
                file, at, size = next(rest)
            for call in (os.preadv, os.pwritev):
                moved.append(call(file, [memory[:size]], at))
                if moved[-1] != size:
                    raise OSError(f"{moved[-1]} of {size} bytes were moved")

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(moved) / (time.perf_counter() - begin)


def is_right(contender: Any, memory: Tensor, crc: int) -> bool:
    """What was written comes back."""
    contender.run("write", 0, memory.numel())
    target = contender._memory if isinstance(contender, DeepNvme) else memory
    source = memory.clone()
    target.zero_()
    contender.run("read", 0, memory.numel())
    right = kernels.crc32(memoryview(target.numpy())) == crc
    memory.copy_(source)
    return right


def measure(
    contenders: dict[str, Any], num_bytes: int, rounds: int, slices: int
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Seconds and CPU seconds of each call."""
    raw: dict[str, dict[str, list[dict[str, float]]]] = {name: {job: [] for job in JOBS} for name in contenders}
    names, size = list(contenders), num_bytes // slices
    for turn in range(rounds * slices):
        start = turn % slices * size
        for job in JOBS:
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                cpu, begin = cpu_seconds(), time.perf_counter()
                contenders[name].run(job, start, start + size)
                seconds = time.perf_counter() - begin
                if isinstance(contenders[name], Fio):
                    seconds = contenders[name].seconds
                raw[name][job].append({"seconds": seconds, "cpu_seconds": cpu_seconds() - cpu})
    return raw


def summarise(raw: dict[str, Any], num_bytes: int, reference: str) -> dict[str, Any]:
    """GB/s, and ratios to the reference, for calls over so many bytes."""

    def seconds(name: str, job: str) -> tuple[float, float]:
        times = [one["seconds"] for one in raw[name][job]]
        return statistics.quantiles(times, n=10)[0], statistics.median(times)

    figures: dict[str, Any] = {name: {} for name in raw}
    for name, jobs in raw.items():
        for job, calls in jobs.items():
            (tenth, median), (their_tenth, their_median) = seconds(name, job), seconds(reference, job)
            figures[name][job] = {
                "gigabytes_per_second": num_bytes / tenth / 1e9,
                "median_gigabytes_per_second": num_bytes / median / 1e9,
                "ratio": their_tenth / tenth,
                "median_ratio": their_median / median,
                "cpu_seconds_per_gigabyte": statistics.median(one["cpu_seconds"] for one in calls) / num_bytes * 1e9,
            }
    return figures


def table_of(summary: dict[str, Any], title: str) -> Table:
    caption = "GB/s and its ratio to the reference's; CPU-s: processor seconds for each GB that is read"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("contender", no_wrap=True)
    for job in JOBS:
        for heading in (job, "ratio", "by medians"):
            table.add_column(heading, justify="right")
    table.add_column("CPU-s", justify="right")
    for name, jobs in summary.items():
        cells = [f"{jobs[job][key]:.2f}" for job in JOBS for key in ("gigabytes_per_second", "ratio", "median_ratio")]
        table.add_row(name, *cells, "-" if name == FIO else f"{jobs['read']['cpu_seconds_per_gigabyte']:.3f}")
    return table


def directory(text: str) -> Path:
    """An argument that names one."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"found '{text}', expected a directory")
    return Path(text)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--path", required=True, type=directory, help="a directory on the drive; written to")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="of the file, and of memory (default 1 GiB)")
    parser.add_argument("--block-size", type=int, default=AioSettings.block_size)
    parser.add_argument("--queue-depth", type=int, default=AioSettings.queue_depth)
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds over all slices (default 10)")
    parser.add_argument("--slices", type=int, default=8, help="that the file lies in (default 8)")
    parser.add_argument("--note", default="", help="kept with the raw results")
    parser.add_argument("--out", default=None, metavar="PATH", help="raw results; '-' for none (default results/)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep the raw figures. 1 if a target is missed."""
    args, console = parse_arguments(argv), Console(width=max(Console().width, 130))
    path: Path = args.path
    settings = AioSettings(block_size=args.block_size, queue_depth=args.queue_depth)
    memory = aligned(args.bytes).random_(generator=torch.Generator().manual_seed(0))
    crc = kernels.crc32(memoryview(memory.numpy()))
    choice, load = choose([path], settings), os.getloadavg()[0]
    with contenders_on(path, memory, settings) as (contenders, missing):
        wrong = [name for name, one in contenders.items() if name != FIO and not is_right(one, memory, crc)]
        raw = measure(contenders, args.bytes, args.rounds, args.slices)
    reference = FIO if FIO in raw else REFERENCE
    summary = summarise(raw, args.bytes // args.slices, reference)
    ours = summary[f"shardwell, {choice.engine}"]
    report = {
        "command": f"python -m benchmarks.disk --path DIRECTORY --bytes {args.bytes} --block-size {args.block_size} "
        f"--queue-depth {args.queue_depth} --rounds {args.rounds} --slices {args.slices}",
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": {**machine(), "load": [load, os.getloadavg()[0]], "file_system": file_system(path)},
        "versions": versions(),
        "note": args.note,
        "reference": reference,
        "choice": vars(choice),
        "wrong": wrong,
        "missing": missing,
        "targets": {job: {"target": TARGET, "found": ours[job]["ratio"]} for job in JOBS},
        "summary": summary,
        "raw": raw,
    }
    title = f"blocks of {args.block_size}, {args.queue_depth} in flight, {args.bytes / 1e9:.1f} GB; against {reference}"
    console.print(table_of(summary, title))
    for name, reason in missing.items():
        console.print(f"{name}: {reason}", highlight=False, markup=False)
    console.print(f"chosen: {choice.engine} ({choice.why})", highlight=False)
    for job in JOBS:
        verdict = "reached" if ours[job]["ratio"] >= TARGET else "missed"
        console.print(f"{job}: {ours[job]['ratio']:.2f}, target {TARGET:.2f}: {verdict}", highlight=False)
    for name in wrong:
        console.print(f"[red]{name}: what was written did not come back[/red]")
    if args.out != "-":
        out = Path(args.out) if args.out else RESULTS / f"disk-{report['date'][:10]}.json"
        out.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"raw results: {out}", highlight=False)
    return 1 if wrong or any(ours[job]["ratio"] < TARGET for job in JOBS) else 0


if __name__ == "__main__":
    raise SystemExit(main())
