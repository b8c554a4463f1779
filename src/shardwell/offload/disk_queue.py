"""The engine that moves the bytes of the disk tier: io_uring, threads of the compiled library, or threads of Python.

Which one is the fastest depends on kernel, disk and cores, so it is measured, once for each set of paths. The
environment variable SHARDWELL_IO (io_uring, threads, python) overrides the measurement.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwell import virtual_time
from shardwell.errors import ShardwellError
from shardwell.kernels import io
from shardwell.kernels.io import SECTOR, IoLibrary, IoOutcome, IoPart, IoQueue, IoQueueShape, IoRequest
from shardwell.kernels.io_reference import ThreadQueue
from shardwell.kernels.library import UnusableLibraryError
from shardwell.memory.device import Device
from shardwell.memory.machine import current_machine
from shardwell.memory.statistics import human
from shardwell.offload.disk_file import DiskFile, disk_error, free_bytes, rounded
from shardwell.virtual_time.virtual_clock import TrackPoint, VirtualClock

ENGINES = ("io_uring", "threads", "python")
JOBS = ("read", "write", "mixed")  # mixed: as many reads as writes, at the same time
_MAX_THREADS = 64  # for each path
_LARGEST_BLOCK = 1 << 30
_HUGE_PAGE = 2 << 20
_TRIAL_BYTES = 64 << 20
_FREE_FOR_TRIAL = 1 << 30  # of host memory: each rank of a machine may try at the same time
_MARGIN = 1.05
_TICK = 200  # ms after which Python checks signals and the clock


@dataclass(frozen=True)
class AioSettings:
    """The keys of the `aio` block, and settings that the block does not have."""

    block_size: int = 1 << 20  # bytes of one read or write, and of a stripe
    queue_depth: int = 8  # blocks in flight, for each path
    intra_op_parallelism: int = 1  # rings with queue_depth blocks each; threads: times queue_depth
    single_submit: bool = False  # io_uring: one system call for each block, not for as many as there are
    overlap_events: bool = True  # io_uring: submit a block for each one that ends; else all in flight end first
    engine: str = "auto"  # or one of ENGINES
    stall_timeout: float = 300.0  # seconds without the end of any block, until that is an error

    def __post_init__(self) -> None:
        if self.block_size % SECTOR or not SECTOR <= self.block_size <= _LARGEST_BLOCK:
            raise ShardwellError(
                f"block_size: found {self.block_size}, expected a multiple of {SECTOR} up to {_LARGEST_BLOCK}"
            )
        for name, most in (("queue_depth", 4096), ("intra_op_parallelism", 64)):
            if not 1 <= getattr(self, name) <= most:
                raise ShardwellError(f"{name}: found {getattr(self, name)}, expected 1 to {most}")
        if self.engine not in ("auto", *ENGINES):
            raise ShardwellError(f"engine: found '{self.engine}', expected auto, {', '.join(ENGINES)}")
        if self.stall_timeout <= 0:
            raise ShardwellError(f"stall_timeout: found {self.stall_timeout}, expected seconds, more than 0")


@dataclass(frozen=True)
class IoEngineChoice:
    """An engine, and the reason for it."""

    engine: str
    why: str


class SimulatedQueue:
    """A queue of a simulation: nothing is moved. Without virtual time every request is done when it is submitted."""

    def submit(self, is_write: bool, parts: Sequence[IoPart], *, urgent: bool = False) -> IoRequest:
        """Return a request that is done, or will be at a time of the clock."""
        clock = virtual_time.clock
        if clock is None:
            return SimulatedRequest()
        size, begin = sum(part.size for part in parts), clock.thread.at
        return SimulatedRequest(clock, clock.disk(size, is_write=is_write, urgent=urgent), begin)

    def close(self) -> None:
        """Do nothing: nothing is in flight."""


@dataclass(frozen=True)
class SimulatedRequest:
    """A request of a simulation, which ends at a time."""

    clock: VirtualClock | None = None
    point: TrackPoint | None = None
    begin: float = 0.0

    def wait(self, milliseconds: int) -> IoOutcome:
        """Return the outcome; with a limit above 0, let the current thread wait until the request has ended."""
        if self.clock is None or self.point is None:
            return IoOutcome(True, 0)
        thread, point = self.clock.thread, self.point
        if milliseconds > 0:
            thread.take_over(point.track, point.time)
        return IoOutcome(point.time <= thread.at, 0, seconds=point.time - self.begin)


def aligned(num_bytes: int, device: Device | None = None) -> Tensor:
    """Return uninitialised bytes of host memory that a disk, and `device` if it is given, can copy to and from.

    The address is a multiple of SECTOR. Large memory uses huge pages: the system pins every page for every transfer,
    and with small pages spends three times the processor time on it.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    page = _HUGE_PAGE if num_bytes >= _HUGE_PAGE else SECTOR
    mapped = mmap.mmap(-1, num_bytes + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if page == _HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    if device is not None:
        device.pin(memory)  # all of it: torch looks pinned memory up by the start of the storage
    start = -memory.data_ptr() % page
    return memory[start : start + num_bytes]


def unusable() -> dict[str, str]:
    """Return the engines that cannot run here, with the reason."""
    try:
        error = IoLibrary().uring_error()
    except UnusableLibraryError as problem:
        return {"io_uring": str(problem), "threads": str(problem)}
    return {"io_uring": f"the system refuses: {os.strerror(error)}"} if error else {}


def open_queue(engine: str, num_paths: int, settings: AioSettings) -> IoQueue:
    """Open a queue that has one file index (`lane`) for each path."""
    parallelism, depth = settings.intra_op_parallelism, settings.queue_depth
    if engine != "io_uring":
        depth, parallelism = min(depth * parallelism, _MAX_THREADS), 1
    shape = IoQueueShape(
        settings.block_size, num_paths, depth, parallelism, settings.single_submit, settings.overlap_events
    )
    try:
        if engine == "python":
            return ThreadQueue(shape)
        return IoLibrary().open(io.IO_URING if engine == "io_uring" else io.THREADS, shape)
    except OSError as error:
        raise ShardwellError(
            f"{engine}: no queue of {depth * parallelism} blocks for each of {num_paths} path(s) ({error.strerror}); "
            "lower queue_depth or intra_op_parallelism, or set SHARDWELL_IO to another engine"
        ) from error


def settle(request: IoRequest, stall_timeout: float) -> IoOutcome:
    """Return how a request ended, or its state once the queue has made no progress for `stall_timeout` seconds."""
    outcome = request.wait(0)
    moved = time.monotonic()
    while not outcome.is_done:
        before = outcome.completed
        outcome = request.wait(min(_TICK, int(1000 * stall_timeout) + 1))
        if outcome.completed != before:
            moved = time.monotonic()
        elif not outcome.is_done and time.monotonic() - moved >= stall_timeout:
            break
    return outcome


Job = dict[bool, Sequence[IoPart]]  # the parts that are written (True) and read (False) at the same time
Speeds = Mapping[str, float]  # bytes per second, by the name of a job
_choices: dict[tuple[object, ...], IoEngineChoice] = {}


def choose(paths: Sequence[Path], settings: AioSettings) -> IoEngineChoice:
    """Return the engine that was asked for, or the fastest one."""
    overrides, source = settings.engine, "engine"
    if overrides == "auto" and (named := os.environ.get("SHARDWELL_IO")):
        overrides, source = named, "SHARDWELL_IO"
        if named not in ENGINES:
            raise ShardwellError(f"SHARDWELL_IO: found '{named}', expected one of {', '.join(ENGINES)}, or nothing")
    reasons = unusable()
    if overrides != "auto":
        if overrides in reasons:
            raise ShardwellError(f"{source}: '{overrides}' cannot be used here ({reasons[overrides]}); use another one")
        return IoEngineChoice(overrides, f"{source} says so")
    if "threads" in reasons:
        return IoEngineChoice("python", reasons["threads"])
    if "io_uring" in reasons:
        return IoEngineChoice("threads", f"io_uring: {reasons['io_uring']}")
    key = (tuple(os.stat(path).st_dev for path in paths), settings)
    if key not in _choices:
        _choices[key] = _faster(paths, settings)
    return _choices[key]


def _faster(paths: Sequence[Path], settings: AioSettings) -> IoEngineChoice:
    if any((free_bytes(path) or 0) < 4 * _TRIAL_BYTES for path in paths):
        return IoEngineChoice("io_uring", f"not measured: less than {human(4 * _TRIAL_BYTES)} are free")
    if current_machine().free_host_bytes() < _FREE_FOR_TRIAL:
        return IoEngineChoice("io_uring", f"not measured: less than {human(_FREE_FOR_TRIAL)} of host memory are free")
    found = measure(paths, settings, _TRIAL_BYTES, ("io_uring", "threads"), ["mixed"])
    return IoEngineChoice(fastest(found), "; ".join(f"{engine} {told(speeds)}" for engine, speeds in found.items()))


def fastest(speeds: Mapping[str, Speeds]) -> str:
    """Return the fastest engine for simultaneous reads and writes, as in training.

    io_uring needs less processor time, so another engine must be faster by a margin.
    """
    return max(speeds, key=lambda engine: speeds[engine]["mixed"] * (_MARGIN if engine == "io_uring" else 1.0))


def told(speeds: Speeds) -> str:
    """Return the speeds as text, in GB/s."""
    return ", ".join(f"{job} {speed / 1e9:.2f}" for job, speed in speeds.items()) + " GB/s"


def measure(
    paths: Sequence[Path],
    settings: AioSettings,
    num_bytes: int,
    engines: Sequence[str],
    jobs: Sequence[str] = JOBS,
    rounds: int = 3,
) -> dict[str, dict[str, float]]:
    """Measure the bytes per second of each engine and job, over `num_bytes` for each path; the best round counts."""
    size = max(rounded(num_bytes), settings.block_size)
    memory = aligned(size * len(paths))
    memory.view(torch.int64).random_(generator=torch.Generator())  # some disks detect zeros and store nothing
    files: list[DiskFile] = []
    try:
        for path in paths:
            files.append(DiskFile(path))
            files[-1].take(size)
        parts = [
            IoPart(0, memory.data_ptr() + lane * size, size, file.descriptor, lane) for lane, file in enumerate(files)
        ]
        all_jobs: dict[str, Job] = {"read": {False: parts}, "write": {True: parts}, "mixed": _halves(parts)}
        _time(engines[0], all_jobs["write"], files, settings)  # the first write to new space costs more than later ones
        best = {engine: dict.fromkeys(jobs, 0.0) for engine in engines}
        for _ in range(rounds):
            for engine, job in itertools.product(engines, jobs):
                seconds = _time(engine, all_jobs[job], files, settings)
                best[engine][job] = max(best[engine][job], memory.numel() / seconds)
    finally:
        for file in files:
            file.close()
    return best


def _halves(parts: Sequence[IoPart]) -> Job:
    """Split each part: the first half is read, the rest is written."""
    reads = [part._replace(size=rounded(part.size // 2)) for part in parts]
    writes = [
        IoPart(whole.offset + half.size, whole.address + half.size, whole.size - half.size, whole.file, whole.lane)
        for whole, half in zip(parts, reads, strict=True)
    ]
    return {False: reads, True: writes}


def _time(engine: str, job: Job, files: Sequence[DiskFile], settings: AioSettings) -> float:
    queue = open_queue(engine, len(files), settings)
    begin = time.perf_counter()
    requests = {is_write: queue.submit(is_write, parts) for is_write, parts in job.items()}
    outcomes = {is_write: settle(request, settings.stall_timeout) for is_write, request in requests.items()}
    seconds = time.perf_counter() - begin
    if all(outcome.is_done for outcome in outcomes.values()):  # else threads hang in the system, and so would close()
        queue.close()
    for is_write, outcome in outcomes.items():
        check(outcome, is_write, job[is_write], [file.path for file in files], settings.stall_timeout)
    return seconds


def check(
    outcome: IoOutcome, is_write: bool, parts: Sequence[IoPart], paths: Sequence[Path], stall_timeout: float
) -> None:
    """Raise if a request did not end successfully."""
    verb = "writing" if is_write else "reading"
    if not outcome.is_done:
        where = ", ".join(str(paths[lane]) for lane in sorted({part.lane for part in parts}))
        size = human(sum(part.size for part in parts))
        raise ShardwellError(
            f"{where}: {verb} {size} has not ended, and nothing else did for {stall_timeout:g} s; look for the drive "
            "in the kernel's log (dmesg), and use another path"
        )
    if outcome.error:
        part = parts[outcome.part]
        doing = f"{verb} {human(part.size)}, at byte {outcome.offset} of the file,"
        raise disk_error(paths[part.lane], doing, outcome.error)
