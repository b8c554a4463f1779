"""One rank of one pass: what ``benchmarks.plan_gpu`` starts, and nobody calls by hand.

The passes: ``calibrate`` measures what `shardwell calibrate` does; ``kernels`` measures single kernels, for those who
look for errors of the cost model; ``train`` trains a case.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_worker import synchronise
from benchmarks.plan_cases import CASES, RANK_CASES, PlanCase

WARM_UP, ROUNDS, STEPS = 2, 2, 3
MOST_KERNELS = 60  # of a profile


def begin(device: str) -> None:
    """Join the other ranks."""
    if device == "cpu":
        os.environ["SHARDWELL_DEVICE"] = "cpu"
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    torch.ones(1, device="cuda").item()


def calibrate(device: str) -> dict[str, Any]:
    """Measure this machine with as many ranks as there are."""
    from shardwell.cli.calibrate_rank import Probe, figures
    from shardwell.memory.machine import ThisMachine

    probe, here, began = Probe(), ThisMachine(), time.perf_counter()
    found = list(figures(probe, None))
    return {
        "device": probe.device.name,
        "has_gpus": probe.on_gpu,
        "figures": found,
        "seconds": time.perf_counter() - began,
        "device_bytes": here.capacity_bytes(torch.device(device, 0) if device == "cuda" else torch.device("cpu")),
        "host_bytes": here.free_host_bytes(),
        "cores": here.num_cores(),
    }


# ----------------------------------------------------------------------------------------------------------- training


def train(case: PlanCase, device: str, profiles: bool) -> dict[str, Any]:
    """Train a case; the seconds of a step are those of the better of two rounds of steps without a pause."""
    import shardwell
    from shardwell.memory.machine import ThisMachine

    began = time.perf_counter()
    engine = shardwell.initialize(model=case.build(device=device), config=case.config()).engine
    tokens = case.tokens(device)
    gc.collect()
    built = time.perf_counter() - began

    def step() -> Tensor:
        for _ in range(case.accumulation):
            loss: Tensor = engine(tokens, tokens)
            engine.backward(loss)
            engine.step()
        return loss.detach()

    losses = [step() for _ in range(WARM_UP)]
    synchronise(device)
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    rounds, returned = [], []
    for _ in range(ROUNDS):
        synchronise(device)
        if dist.get_world_size() > 1:
            dist.barrier()
        start = time.perf_counter()
        for number in range(STEPS):
            losses.append(step())
            if not number:
                returned.append(time.perf_counter() - start)  # the host alone, unless it waits for the device
        synchronise(device)
        rounds.append((time.perf_counter() - start) / STEPS)
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if on_gpu else (None, None)
    workspace = ThisMachine().workspace_bytes(torch.device("cuda", 0)) if on_gpu else 0
    return {
        "seconds": min(rounds),
        "all_seconds": rounds,
        "host_seconds": min(returned),
        "build_seconds": built,
        "peak_allocated": peaks[0],
        "peak_reserved": peaks[1],
        "workspace_bytes": workspace,
        "losses": [float(loss) for loss in losses],
        "kernels": kernel_times(step) if on_gpu and profiles else [],
    }


def kernel_times(step: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the kernels of one step that take most of the device's time."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda one: -float(one.self_device_time_total))[:MOST_KERNELS]
    return [
        {"name": one.key[:160], "calls": one.count, "seconds": float(one.self_device_time_total) / 1e6} for one in rows
    ]


# ------------------------------------------------------------------------------------------------------ single kernels


def kernels(device: str) -> dict[str, float]:
    """Return the seconds of single operations at the sizes of the cases, each after a long row of itself."""
    rows, found = (16384, 8192) if device == "cuda" else (64, 32), dict[str, float]()

    def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    for tokens in rows:
        for width, inner in ((2048, 5504), (4096, 11008)) if device == "cuda" else ((32, 64),):
            x, gate = numbers(tokens, width), numbers(tokens, inner)
            weight = numbers(inner, width)
            size = f"{tokens} x {width} x {inner}"
            found[f"forward product {size}"] = seconds(device, lambda x=x, w=weight: F.linear(x, w))
            found[f"input gradient {size}"] = seconds(device, lambda g=gate, w=weight: g @ w)
            found[f"weight gradient {size}"] = seconds(device, lambda x=x, g=gate: g.t() @ x)
            found[f"silu {tokens} x {inner}"] = seconds(device, lambda g=gate: F.silu(g))
            found[f"multiply {tokens} x {inner}"] = seconds(device, lambda g=gate: g * g)
            found[f"to fp32 {tokens} x {inner}"] = seconds(device, lambda g=gate: g.float())
            found[f"rms norm {tokens} x {width}"] = seconds(device, lambda x=x: F.rms_norm(x, (x.shape[1],)))
    length = 2048 if device == "cuda" else 32
    for heads, dim in ((16, 128), (32, 64)):
        query, key, value = (numbers(4, heads, length, dim).requires_grad_() for _ in range(3))

        def attend(q: Tensor = query, k: Tensor = key, v: Tensor = value) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = attend()
        gradient = torch.ones_like(out)
        found[f"attention 4 x {heads} x {length} x {dim}"] = seconds(device, attend)
        found[f"attention backward 4 x {heads} x {length} x {dim}"] = seconds(
            device,
            lambda o=out, g=gradient, i=(query, key, value): torch.autograd.grad(o, i, g, retain_graph=True),
        )
    logits = numbers(rows[1], 32000 if device == "cuda" else 64, dtype=torch.float32).requires_grad_()
    targets = torch.zeros(rows[1], dtype=torch.long, device=device)
    found[f"cross entropy {tuple(logits.shape)}"] = seconds(device, lambda: F.cross_entropy(logits, targets))
    return found


def seconds(device: str, work: Callable[[], object], least: float = 0.1) -> float:
    """Return what one of many of the same takes, after a tenth of a second of them."""
    work()
    number, took = 1, 0.0
    while took < least:
        synchronise(device)
        start = time.perf_counter()
        for _ in range(number):
            work()
        synchronise(device)
        took = time.perf_counter() - start
        number = number if took >= least else max(2 * number, int(number * 1.2 * least / max(took, 1e-6)))
    return took / number


def main() -> None:
    """Run the pass that the JSON in argv[1] describes."""
    spec = json.loads(sys.argv[1])
    device = spec["device"]
    begin(device)
    if spec["pass"] == "calibrate":
        result: dict[str, Any] = calibrate(device)
    elif spec["pass"] == "kernels":
        result = kernels(device)
    else:
        case = (CASES if dist.get_world_size() == 1 else RANK_CASES)[spec["case"]]
        result = train(case.tiny() if device == "cpu" else case, device, spec["profiles"])
    Path(spec["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
