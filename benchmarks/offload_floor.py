"""What no offloaded step can be faster than: the GPU's work, the bus, and the update in host memory, each alone.

    at once          max(compute, update, bus)          compute = forward + backward
    after the norm   backward + max(forward, update)
    on the device    compute

Compute is that of the bare model in bf16, without an engine or an update. The bus carries 2 bytes a parameter each way
at once (with accumulation fp32 gradients come down: 4). Updates are the compiled kernel's, over more memory than caches
hold, with the threads that offload uses.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.contenders import Workload, seeded_model
from benchmarks.gpu_worker import batches, synchronise
from benchmarks.kernels import OPTIONS, OURS, Slice
from benchmarks.offload_variants import Variant
from shardwell import kernels
from shardwell.memory.device import Device
from shardwell.offload.cores import update_cores

REPEATS = 5
SLICES = 2
COPIED = 2**28  # bytes of a copy over the bus
FORMULAS = {
    "on the device": "compute",
    "at once": "max(compute, update, bus)",
    "after the norm": "backward + max(forward, update)",
}


def median_seconds(work: Callable[[], None], device: str, warm_up: int = 2) -> float:
    seconds: list[float] = []
    for repeat in range(-warm_up, REPEATS):
        synchronise(device)
        begin = time.perf_counter()
        work()
        synchronise(device)
        if repeat >= 0:
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def compute_seconds(workload: Workload) -> dict[str, float]:
    """Forward, and forward with backward, of the model alone."""
    model = seeded_model(workload).to(torch.bfloat16)
    data = batches(workload)[0]

    def both() -> None:
        model(*data).backward()
        model.zero_grad(set_to_none=True)

    forward = median_seconds(lambda: model(*data), workload.device)
    return {"forward": forward, "compute": median_seconds(both, workload.device)}


def bus_rates(device: str) -> dict[str, float] | None:
    """Bytes a second between pinned memory and the GPU: down and up alone, and each of them when both run."""
    if device != "cuda":
        return None
    host = [torch.empty(COPIED, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(COPIED, dtype=torch.uint8, device=device) for _ in range(2)]
    lanes = [torch.cuda.Stream(), torch.cuda.Stream()]

    def copy(down: bool, up: bool) -> None:
        for _ in range(4):  # turn by turn, so that both lanes always have work
            if down:
                with torch.cuda.stream(lanes[0]):
                    host[0].copy_(there[0], non_blocking=True)
            if up:
                with torch.cuda.stream(lanes[1]):
                    there[1].copy_(host[1], non_blocking=True)

    ways = {"down": (True, False), "up": (False, True), "each_of_both": (True, True)}
    return {name: 4 * COPIED / median_seconds(partial(copy, *which), device) for name, which in ways.items()}


def update_rates(device: str, numel: int) -> dict[str, float]:
    """Elements a second of AdamW with fp32 and with 8-bit moments."""
    buses = Device(device).local_gpu_buses()
    cores = None if buses is None else update_cores(*buses)
    threads = torch.get_num_threads() if cores is None else len(cores)
    slices = [Slice(numel) for _ in range(SLICES)]
    found: dict[str, float] = {"threads": threads}
    for name, kind in (("fp32", OURS), ("8bit", f"{OURS}, 8-bit moments")):
        stretches = [part.stretches()[kind] for part in slices]

        def update(stretches: list[kernels.UpdateArgs] = stretches) -> None:
            for stretch in stretches:
                kernels.update(kernels.AdamRule(**OPTIONS, decoupled=True, step=2), stretch, threads)

        found[name] = SLICES * numel / median_seconds(update, "cpu")
    return found


def measure_floor(workload: Workload) -> dict[str, Any]:
    """All that the formulas need, in seconds for this model."""
    parameters = workload.model.num_parameters
    updates = update_rates(workload.device, 2**25 if workload.device == "cuda" else 2**12)
    bus = bus_rates(workload.device)
    found: dict[str, Any] = compute_seconds(workload)
    found["backward"] = found["compute"] - found["forward"]
    found["update"] = {moments: parameters / updates[moments] for moments in ("fp32", "8bit")}
    found["bus"] = None if bus is None else 2 * parameters / bus["each_of_both"]
    return {**found, "rates": {"bus": bus, "update": updates, "kernel": str(kernels.describe())}}


def floor_of(variant: Variant, found: dict[str, Any]) -> float | None:
    """Seconds of a variant's step at least; None where a part rests on the device, for no formula knows how much."""
    if variant.engine != "shardwell" or (variant.offload is not None and variant.offload.get("ratio") != 1):
        return None
    micro_steps = variant.accumulation
    update = found["update"]["8bit" if variant.own.get("moments") == "8bit" else "fp32"]
    bus = (found["bus"] or 0.0) * (2 if micro_steps > 1 else 1)
    if variant.commit == "on the device":
        return float(micro_steps * found["compute"])
    if variant.commit == "at once":
        return float(max(micro_steps * found["compute"], update, bus))
    return float((micro_steps - 1) * found["compute"] + found["backward"] + max(found["forward"], update))
