"""One contender on one GPU in one pass: what ``benchmarks.gpu`` starts, and nobody calls by hand."""

from __future__ import annotations

import gc
import gzip
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import GPU_CONTENDERS, ONLY_BY_NAME, PROFILED, RANK_CONTENDERS, Trainer, Workload, by_name
from benchmarks.model import PRESETS
from benchmarks.streams import lanes, summarise_trace

WARM_UP_STEPS = 3
PROFILED_STEPS = 2


def synchronise(device: str) -> None:
    """Wait until the device has done all that it was asked."""
    if device == "cuda":
        torch.cuda.synchronize()


def batches(workload: Workload) -> list[tuple[Tensor, Tensor]]:
    """Two batches, used in turn, so that the loss falls and a wrong update shows."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, workload.batch, workload.model.seq + 1)
    tokens = torch.randint(0, workload.model.vocab, shape, generator=generator).to(workload.device)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens]


def timing_pass(
    trainer: Trainer, workload: Workload, steps: int, warm_up: int = WARM_UP_STEPS, each: bool = True
) -> dict[str, Any]:
    """Seconds a step, model TFLOP/s, and memory at the peak of the timed steps.

    Without ``each`` the device is waited for after all steps only, as in a loop that reads its losses: what a step
    leaves in flight, such as all-gathers of updated parameters, may run under the next one.
    """
    data = batches(workload)
    losses = [trainer.step(*data[step % 2]) for step in range(warm_up)]
    gc.collect()
    on_gpu = workload.device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    synchronise(workload.device)
    first = begin = time.perf_counter()
    for step in range(warm_up, warm_up + steps):
        losses.append(trainer.step(*data[step % 2]))
        if each:
            synchronise(workload.device)
        seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    synchronise(workload.device)
    if not each:
        seconds = [(time.perf_counter() - first) / steps]
    median = statistics.median(seconds)
    flops = 6 * workload.model.num_parameters * workload.batch * workload.model.seq
    return {
        "seconds": median,
        "all_seconds": seconds,
        "tflops": flops / median / 1e12,
        "peak_allocated": torch.cuda.max_memory_allocated() if on_gpu else None,
        "peak_reserved": torch.cuda.max_memory_reserved() if on_gpu else None,
        "rest_allocated": torch.cuda.memory_allocated() if on_gpu else None,
        "rss_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": losses,
    }


def profile_pass(trainer: Trainer, workload: Workload, folder: Path) -> dict[str, Any]:
    """Which stream did what in two steps; the whole trace is kept beside the summary."""
    data = batches(workload)
    for step in range(WARM_UP_STEPS):
        trainer.step(*data[step % 2])
    synchronise(workload.device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if workload.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for step in range(PROFILED_STEPS):
            trainer.step(*data[(WARM_UP_STEPS + step) % 2])
        synchronise(workload.device)
    trace = folder / "trace.json.gz"
    profiler.export_chrome_trace(str(trace))
    with gzip.open(trace, "rt") as text:
        return summarise_trace(json.load(text), prefix="shardwell::")


def lanes_pass(trainer: Trainer, workload: Workload) -> dict[str, Any]:
    """What ran on the device in one step, by lanes, and the share of it in which the link was idle."""
    data = batches(workload)
    for step in range(WARM_UP_STEPS):
        trainer.step(*data[step % 2])
    synchronise(workload.device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if workload.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile(activities=activities) as profiler:
            trainer.step(*data[WARM_UP_STEPS % 2])
            synchronise(workload.device)
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        return lanes(json.loads(trace.read_text()))


def begin(spec: dict[str, Any]) -> Workload:
    """Start the process group of a rank, and return what is trained."""
    device = spec["device"]
    if device == "cuda":
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    preset, batch = PRESETS[spec["size"]], spec["batch"]
    return Workload(preset, batch, device, bf16=True, clip=1.0, checkpoint=True, learning_rate=1e-4)


def main() -> None:
    """Run the pass that the JSON in argv[1] describes."""
    spec = json.loads(sys.argv[1])
    workload = begin(spec)
    trainer = by_name((*GPU_CONTENDERS, *RANK_CONTENDERS, *ONLY_BY_NAME, PROFILED), spec["contender"]).build(workload)
    if spec["pass"] == "profile":
        result = profile_pass(trainer, workload, Path(spec["profile"]))
    elif spec["pass"] == "lanes":
        result = lanes_pass(trainer, workload)
    else:
        warm_up = spec.get("warm_up", WARM_UP_STEPS)
        result = timing_pass(trainer, workload, spec["steps"], warm_up, each=spec.get("each", True))
    Path(spec["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
