"""One rank of `shardwell calibrate`: it measures while the others measure the same, and the slowest rank counts.

Every figure is the best of some repeats after a warm-up, within a limit of time: other work on the machine only makes
it slower. Kernels, transports and queues are those that training uses.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwell import kernels
from shardwell.cli.calibrate_kernels import kernel_figures
from shardwell.memory import Device, MemoryStats, TemporaryBuffers
from shardwell.memory.local_gpus import default_device
from shardwell.offload.cores import update_cores
from shardwell.offload.disk_queue import AioSettings, choose, measure
from shardwell.parallel.collectives import Collectives
from shardwell.parallel.mesh import RankGroup, start_process_group
from shardwell.parallel.traffic import TrafficStats

_REPEATS, _LIMIT = 5, 0.8  # of a figure: at most so many repeats, and about so many seconds
_CHAIN = 200  # small operations in a row
_LASTING = 0.15  # seconds of products in a row: a GPU that is kept busy lowers its clock
_STEPPED, _STEPPED_BESIDE_GPU = 1 << 22, 1 << 26  # elements of an update on the host: more than its caches hold
_DISK_BYTES = 256 << 20


@dataclass(frozen=True)
class CalibrationJob:
    """The job that the command gives to its ranks."""

    out: str  # the file for the figures, which rank 0 writes
    path: str | None = None  # a directory on the drive to measure

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Probe:
    """The device of this rank, its peers, and a stopwatch."""

    def __init__(self) -> None:
        where = default_device()
        start_process_group(where)
        self.device = Device(where)
        self.on_gpu = self.device.has_streams
        has_peers = dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if has_peers else (0, 1)
        backend = str(dist.get_backend()) if has_peers else "none"
        mesh = RankGroup(self.rank, self.size, self.size, backend, local_world_size=self.size)
        self.comm = Collectives(mesh, self.device, TrafficStats(), TemporaryBuffers(self.device, MemoryStats()))

    def numbers(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return random numbers: hardware is faster with equal ones."""
        return torch.randn(*shape, device=self.device.torch_device).to(dtype)

    def seconds(self, work: Callable[[], object], *, together: bool = True) -> float:
        """Return the least seconds that some work took; of all ranks at the same time, those of the slowest."""
        found: list[float] = []
        began = time.perf_counter()
        for repeat in range(_REPEATS + 1):
            if together:
                self.meet()
            else:
                self._wait_for_device()
            begin = time.perf_counter()
            work()
            self._wait_for_device()
            if repeat:  # the first warms up
                found.append(time.perf_counter() - begin)
            is_late = time.perf_counter() - began > _LIMIT and len(found) > 0
            if self.slowest(float(is_late)) if together else is_late:
                break
        return self.slowest(min(found)) if together else min(found)

    def lasting_seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of one of many of the same in a row, which keep a GPU busy as training does."""
        once = self.seconds(work)
        number = max(1, round(_LASTING / once)) if self.on_gpu else 1

        def row() -> None:
            for _ in range(number):
                work()

        return once if number == 1 else self.seconds(row) / number

    def meet(self) -> None:
        """Wait for the device and for the other ranks."""
        if self.size > 1:
            self.comm.barrier("CALIBRATE")
        self._wait_for_device()

    def _wait_for_device(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device.torch_device)

    def slowest(self, value: float) -> float:
        """Return the greatest value of all ranks."""
        return value if self.size == 1 else -self.comm.all_reduce_min(-value, "CALIBRATE")


def figures(probe: Probe, path: str | None) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, the value and the origin of each figure."""
    beside = f" on each of {probe.size} ranks at once" if probe.size > 1 else ""
    yield from kernel_figures(probe, beside)
    small = _small_operations(probe)
    yield "launch_seconds", small, f"{_CHAIN} small products in a row, forward and backward{beside}"
    if probe.on_gpu:
        yield "kernel_seconds", _small_kernels(probe), f"{_CHAIN} small kernels in a row{beside}"
        up, down = _bus(probe)
        yield "copy_up", up, f"copies from pinned memory beside copies to it{beside}"
        yield "copy_down", down, f"copies to pinned memory beside copies from it{beside}"
    update = HostUpdateProbe(probe)
    rate = update.rate()
    words = f"{update.threads} threads{beside}, beside copies if there is a GPU"
    yield "host_update", rate, f"AdamW over bf16 gradients, {words}"
    share = min(1.0, update.rate(out_of_place=True) / rate)  # it moves more bytes
    yield "out_of_place_share", share, f"the same from one memory to another, as speculative updates, {words}"
    yield "eight_bit_share", update.rate(eight_bit=True) / rate, f"the same with moments in 8 bits, {words}"
    if path is not None:
        speed = _disk(probe, Path(path))
        for name in ("disk_read", "disk_write"):
            yield name, speed, "reads and writes at the same time, together, bypassing the page cache"
    if probe.size > 1:
        latency, rate, both = _links(probe)
        yield "inside", rate, f"all-gathers over {probe.size} ranks of this machine: what a rank receives"
        yield "inside_seconds", latency, f"small all-gathers over {probe.size} ranks of this machine"
        if probe.on_gpu:
            yield "two_communicators", both / rate, "all-gathers beside reduce-scatters on a communicator of their own"


def _small_operations(probe: Probe) -> float:
    x = torch.ones(16, device=probe.device.torch_device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(_CHAIN):
            y = y * x
        y.sum().backward()

    return probe.seconds(chain) / (3 * _CHAIN)  # backward has two products for each


def _small_kernels(probe: Probe) -> float:
    x = torch.ones(16, device=probe.device.torch_device)
    graph = torch.cuda.CUDAGraph()  # so that the host is no part of it
    x.mul_(1.0)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads ask for events meanwhile
        for _ in range(_CHAIN):
            x.mul_(1.0)
    return probe.seconds(graph.replay) / _CHAIN


def _bus(probe: Probe) -> tuple[float, float]:
    """Return the bytes per second of copies in each direction while the other direction copies, too."""
    size = 1 << 28
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device=probe.device.torch_device) for _ in range(2)]

    def both() -> None:
        with probe.device.copy_stream.after_current():
            host[0].copy_(there[0], non_blocking=True)
        with probe.device.upload_stream.after_current():
            there[1].copy_(host[1], non_blocking=True)

    rate = size / probe.seconds(both)
    return rate, rate


class HostUpdateProbe:
    """Optimizer steps in host memory, of all ranks together, beside copies as training has them."""

    def __init__(self, probe: Probe) -> None:
        self._probe, self._numel = probe, _STEPPED_BESIDE_GPU if probe.on_gpu else _STEPPED
        buses = probe.device.local_gpu_buses()
        cores = None if buses is None else update_cores(*buses)
        self.threads = torch.get_num_threads() if cores is None else len(cores)
        size = 4 * self._numel  # a gradient goes down in 16 bits, and a parameter up
        self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True) if probe.on_gpu else None
        there = probe.device.torch_device
        self._there = torch.empty(size, dtype=torch.uint8, device=there) if probe.on_gpu else None

    def rate(self, *, out_of_place: bool = False, eight_bit: bool = False) -> float:
        """Return the bytes per second of updates in one form."""
        gradient = torch.ones(self._numel, dtype=torch.bfloat16)
        (master, state), new = self._state(eight_bit), self._state(eight_bit) if out_of_place else None
        out = torch.ones_like(gradient)
        there = None if new is None else kernels.OutOfPlaceState(*new)
        args = kernels.UpdateArgs(gradient, master, state, out=out, seed=1, new=there)
        rule = kernels.AdamRule(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=True, step=2)

        def update() -> None:
            if self._pinned is not None and self._there is not None:
                with self._probe.device.copy_stream.after_current():
                    self._pinned.copy_(self._there, non_blocking=True)
            kernels.update(rule, args, self.threads)

        return self._probe.size * args.num_bytes / self._probe.seconds(update)

    def _state(self, eight_bit: bool) -> tuple[Tensor, Any]:
        master = torch.ones(self._numel)  # zeros that nothing has written are all the same page
        if not eight_bit:
            return master, (torch.ones(self._numel), torch.ones(self._numel))
        sizes = (self._numel, self._numel, -(-self._numel // kernels.BLOCK), -(-self._numel // kernels.BLOCK))
        one, other, first, second = (torch.ones(size, dtype=torch.uint8) for size in sizes)
        return master, kernels.Moments8bitArgs((one, other), (first, second))


def _disk(probe: Probe, path: Path) -> float:
    """Return the bytes per second of reads and writes together; one rank measures for all."""
    found = 0.0
    if probe.rank == 0:
        settings = AioSettings()
        engine = choose([path], settings).engine
        found = measure([path], settings, _DISK_BYTES, [engine], ["mixed"], rounds=2)[engine]["mixed"]
    if probe.size > 1:
        found = -probe.comm.all_reduce_min(-found, "CALIBRATE")
    return found


def _links(probe: Probe) -> tuple[float, float, float]:
    """Return the seconds of a small all-gather, the bytes per second that a rank receives in a large one, and in both.

    Both are a large all-gather and a reduce-scatter at once, which have communicators of their own on a GPU.
    """
    device, size = probe.device.torch_device, probe.size
    small = torch.zeros(size * 16, device=device)
    large = torch.zeros(size * ((1 << 24) if probe.on_gpu else (1 << 21)), device=device)
    latency = probe.seconds(lambda: probe.comm.all_gather(small, None).wait())
    seconds = probe.seconds(lambda: probe.comm.all_gather(large, None).wait())
    received = large.nbytes * (size - 1) / size
    gradients, shard = torch.zeros_like(large), large.new_zeros(large.numel() // size)

    def both() -> None:
        works = probe.comm.all_gather(large, None), probe.comm.reduce_scatter(gradients, shard, 1.0, False, None)
        for work in works:
            work.wait()

    together = probe.seconds(both) if probe.on_gpu else seconds
    return latency, received / max(seconds - latency, 1e-9), 2 * received / max(together - latency, 1e-9)


def main() -> None:
    job = CalibrationJob(**json.loads(sys.argv[1]))
    probe = Probe()
    found = [(name, value, how) for name, value, how in figures(probe, job.path)]
    if probe.rank == 0:
        about = {"device": probe.device.name, "has_gpus": probe.on_gpu, "figures": found}
        Path(job.out).write_text(json.dumps(about), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
