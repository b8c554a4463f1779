"""One variant in one process: what ``benchmarks.offload`` starts, and nobody calls by hand."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import Workload
from benchmarks.gpu_worker import batches, synchronise
from benchmarks.offload_floor import measure_floor
from benchmarks.offload_timeline import profile_step
from benchmarks.offload_variants import (
    SIZES,
    VARIANTS,
    Size,
    Variant,
    build,
    clip_rate,
    prepare,
    workload_of,
)

GIB = 2**30


def bytes_of(file: str, key: str) -> int | None:
    """What a line of a file in /proc says, in bytes."""
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")]
    return found[0] if found else None


class Steps(Protocol):
    """A model and an engine that are ready to train."""

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor: ...


class HostMemory:
    """What this process takes of the host from now on: by its own pages, and by what the machine has left.

    Pinned memory that CUDA allocated may not count as the process' own pages; the machine always misses it. But others
    take from the machine as well.
    """

    def __init__(self) -> None:
        gc.collect()
        self._before, self._left = bytes_of("self/status", "VmRSS") or 0, bytes_of("meminfo", "MemAvailable")
        self._least, self._is_over = self._left, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self._left is not None and not self._is_over.wait(0.1):
            self._least = min(self._least or self._left, bytes_of("meminfo", "MemAvailable") or self._left)

    def figures(self, parameters: int) -> dict[str, Any]:
        """Bytes so far, and for each parameter."""
        self._is_over.set()
        self._thread.join()
        peak = bytes_of("self/status", "VmHWM") or 0  # getrusage's would be that of the parent if that was greater
        rest = bytes_of("self/status", "VmRSS") or 0
        missed = None if self._left is None or self._least is None else self._left - self._least
        return {
            "rss_before": self._before,
            "rss_peak": peak,
            "host_bytes_per_parameter": (peak - self._before) / parameters,
            "host_rest_bytes_per_parameter": (rest - self._before) / parameters,
            "machine_bytes_per_parameter": None if missed is None else missed / parameters,
        }


def steady_pass(
    trainer: Steps,
    workload: Workload,
    steps: int,
    warm_up: int,
    note: Callable[[], None] = lambda: None,
    seconds: float = math.inf,
) -> dict[str, Any]:
    """Steps one after the other, as a training loop takes them: nobody waits for the device in between.

    What of the last warm-up step still goes on at the begin is what of the last step still goes on at the end. Both are
    when ``note`` is called. After the first timed step none is begun that would end after so many seconds.
    """
    until = time.perf_counter() + seconds
    data = batches(workload)
    losses = [trainer.step(*data[step % 2]) for step in range(warm_up)]
    gc.collect()
    synchronise(workload.device)
    on_gpu = workload.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    note()
    begin, returned = time.perf_counter(), list[float]()
    for step in range(warm_up, warm_up + steps):
        if returned and begin + returned[-1] * (1 + 1 / len(returned)) > until:
            break
        losses.append(trainer.step(*data[step % 2]))
        returned.append(time.perf_counter() - begin)
    synchronise(workload.device)
    seconds = (time.perf_counter() - begin) / len(returned)
    note()
    flops = 6 * workload.model.num_parameters * workload.batch * workload.model.seq
    return {
        "seconds": seconds,
        "returned_seconds": returned,
        "tflops": flops / seconds / 1e12,
        "peak_allocated": torch.cuda.max_memory_allocated() if on_gpu else None,
        "peak_reserved": torch.cuda.max_memory_reserved() if on_gpu else None,
        "rest_allocated": torch.cuda.memory_allocated() if on_gpu else None,
        "losses": [float(loss) for loss in losses],
    }


def measure(variant: Variant, size: Size, device: str, steps: int) -> dict[str, Any]:
    """Build, then time steps."""
    host, workload, begin = HostMemory(), workload_of(size, variant, device), time.perf_counter()
    trainer = build(variant, workload)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()  # what is reserved later is what training needs
    built = time.perf_counter() - begin
    figures = steady_pass(trainer, workload, steps, size.warm_up)
    figures["tflops"] *= variant.accumulation
    tokens = variant.accumulation * size.batch * size.model.seq
    return {
        **figures,
        **host.figures(size.model.num_parameters),
        "build_seconds": built,
        "tokens_per_second": tokens / figures["seconds"],
        "norms": [float(norm) for norm in trainer.norms],
        "clip_rate": clip_rate(trainer, variant),
        "note": trainer.note,
    }


def start(variant: Variant, device: str, most_gib: float | None) -> None:
    """Get the engine and the device, so that neither counts as memory of the variant."""
    prepare(variant)
    if device == "cpu":
        os.environ["SHARDWELL_DEVICE"] = "cpu"
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return
    torch.cuda.set_device(0)
    if most_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most_gib * GIB / total))
    backend = "cpu:gloo,cuda:nccl" if variant.engine == "fsdp2" else "nccl"  # FSDP2 sums the norm on the host
    dist.init_process_group(backend, device_id=torch.device("cuda", 0))
    torch.ones(1, device="cuda").item()


def main() -> None:
    """Run the pass that the JSON in argv[1] describes."""
    spec = json.loads(sys.argv[1])
    size, variant, device = SIZES[spec["size"]], VARIANTS[spec["variant"]], spec["device"]
    start(variant, device, None if spec["pass"] == "floor" else size.most_gib)
    workload = workload_of(size, variant, device)
    if spec["pass"] == "floor":
        result = measure_floor(workload)
    elif spec["pass"] == "timeline":
        result = profile_step(build(variant, workload), workload)
    else:
        result = measure(variant, size, device, spec["steps"])
    Path(spec["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
