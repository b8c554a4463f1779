"""What is in use while steps run: bytes of the drives, seconds of the update, the GPU and its bus.

Bytes are counted where the disk tier takes a request, and by the system for the whole process. Updates are timed around
the kernel. The GPU is asked through the driver's own library, NVML. What does not answer is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.offload_timeline import timed_updates
from shardwell.offload.disk import DiskTier

PAUSE = 0.2  # seconds between two questions to the GPU
_TO_GPU, _FROM_GPU = 1, 0  # NVML's numbers of the ways over the bus


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@dataclass
class Sample:
    """The share of a short while in which a kernel ran, and bytes a second over the bus."""

    busy: float | None
    to_gpu: float | None
    from_gpu: float | None


class Gpu:
    """The GPU as the driver sees it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        name = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
        ended = self._library.nvmlInit_v2() or self._library.nvmlDeviceGetHandleByUUID(
            ctypes.c_char_p(name), ctypes.byref(self._handle)
        )
        if ended:
            raise OSError(f"NVML error {ended}")

    def sample(self) -> Sample:
        found = _Utilization()
        failed = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(found))
        return Sample(None if failed else found.gpu / 100, self._bus(_TO_GPU), self._bus(_FROM_GPU))

    def _bus(self, way: int) -> float | None:
        rate = ctypes.c_uint()  # KB a second, over 20 ms
        failed = self._library.nvmlDeviceGetPcieThroughput(self._handle, way, ctypes.byref(rate))
        return None if failed else rate.value * 1000.0


@dataclass
class Counts:
    """So far: bytes read from disk and written there, and when each update began and ended."""

    read: int = 0
    written: int = 0
    updates: list[tuple[int, int]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True)
class Note:
    """The counts at a moment."""

    at: float
    read: int
    written: int
    process_moved: int | None
    num_samples: int


class Watch:
    """Counts while it is open; ``note`` marks moments."""

    def __init__(self) -> None:
        self._counts, self._scope, self._is_over = Counts(), contextlib.ExitStack(), threading.Event()
        self.notes: list[Note] = []

    def __enter__(self) -> Watch:
        self._scope.enter_context(timed_updates(self._counts.updates))
        self._scope.enter_context(_counted(self._counts))
        if torch.cuda.is_available():
            thread = threading.Thread(target=self._ask_gpu, daemon=True)
            thread.start()
            self._scope.callback(thread.join)
            self._scope.callback(self._is_over.set)
        return self

    def __exit__(self, *error: object) -> None:
        self._scope.close()

    def note(self) -> None:
        counts = self._counts
        self.notes.append(
            Note(time.perf_counter(), counts.read, counts.written, _moved_by_process(), len(counts.samples))
        )

    def between(self, first: Note, last: Note) -> dict[str, Any]:
        """Bytes, and shares of the time in use."""
        seconds = last.at - first.at
        updates = [(max(begin / 1e9, first.at), min(end / 1e9, last.at)) for begin, end in self._counts.updates]
        samples = self._counts.samples[first.num_samples : last.num_samples]
        return {
            "disk_read": last.read - first.read,
            "disk_written": last.written - first.written,
            "process_moved": _less(last.process_moved, first.process_moved),
            "update_busy": sum(max(0.0, end - begin) for begin, end in updates) / seconds,
            "gpu_busy": _mean([one.busy for one in samples]),
            "bus_up_rate": _mean([one.to_gpu for one in samples]),
            "bus_down_rate": _mean([one.from_gpu for one in samples]),
        }

    def _ask_gpu(self) -> None:
        try:
            gpu = Gpu()
        except (OSError, AttributeError):
            return
        while not self._is_over.wait(PAUSE):
            self._counts.samples.append(gpu.sample())


@contextlib.contextmanager
def _counted(counts: Counts) -> Iterator[None]:
    """Count every request to a disk tier of this process."""
    lock = threading.Lock()

    def counting(original: Callable[..., Any], way: str) -> Callable[..., Any]:
        def move(tier: DiskTier, extent: Any, start: int, memory: torch.Tensor, **others: Any) -> Any:
            with lock:
                setattr(counts, way, getattr(counts, way) + memory.numel() * memory.element_size())
            return original(tier, extent, start, memory, **others)

        return move

    before = {name: getattr(DiskTier, name) for name in ("read", "write")}
    for (name, original), way in zip(before.items(), ("read", "written"), strict=True):
        setattr(DiskTier, name, counting(original, way))
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(DiskTier, name, original)


def _moved_by_process() -> int | None:
    """Bytes that this process had drives read and write, by the system's count."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in lines if line.startswith(("read_bytes:", "write_bytes:")))


def _less(value: int | None, other: int | None) -> int | None:
    return None if value is None or other is None else value - other


def _mean(values: list[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None
