"""The host time of tensor parallelism: layers on plain tensors beside torch's DTensor layers, on two CPU ranks.

    python -m benchmarks.tensor_host_time [--steps 20] [--json PATH]

Both are trained by this project's engine at stage 0, in the same processes, a step of each in turn, so that a slow
minute hits both. The model is so small that the time is that of the host: CPU seconds of a process in forward and
backward, median over the steps. All-reduces are counted where torch is called.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.launch import run_ranks
from benchmarks.measure import circumstances, command_line
from benchmarks.parallel3d_worker import PLAN, Block, cut_by_torch

BLOCKS, WIDTH, HEAD, ROWS, LENGTH = 8, 64, 16, 2, 16


class CountedSums:
    """Counts the all-reduces of a block of code, by a wrapper of torch's function and of the functional one."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> CountedSums:
        self._own = dist.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += args[0].numel() >= ROWS * LENGTH * WIDTH  # hidden states, no numbers
            return self._own(*args, **kwargs)

        dist.all_reduce = counted
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)
        dist.all_reduce = self._own
        events = self._profiler.key_averages()
        self.count += sum(event.count for event in events if event.key == "_c10d_functional::all_reduce")


def engine_of(kind: str) -> Any:
    """Return an engine over a model that the plan or torch has cut."""
    import shardwell

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH, HEAD) for _ in range(BLOCKS)))
    config: dict[str, Any] = {
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "train_micro_batch_size_per_gpu": ROWS,
    }
    if kind == "own":
        config["tensor_parallel"] = {"autotp_size": 2, "plan": PLAN}
    else:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for block in model:
            cut_by_torch(block, mesh)
    return shardwell.initialize(model=model, config=config, device="cpu").engine


def step(engine: Any) -> float:
    """Train a step; return the CPU seconds of forward and backward, which is where the layers are."""
    rows = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    begin = time.process_time()
    engine.backward(engine(rows).square().mean())
    seconds = time.process_time() - begin
    engine.step()
    return seconds


def worker(spec: dict[str, Any]) -> None:
    """Measure as one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engines = {kind: engine_of(kind) for kind in ("own", "dtensor")}
    seconds: dict[str, list[float]] = {kind: [] for kind in engines}
    for number in range(spec["steps"] + 3):
        for kind, engine in engines.items():
            found = step(engine)
            if number >= 3:
                seconds[kind].append(found)
    sums = {}
    for kind, engine in engines.items():
        with CountedSums() as counted:
            step(engine)
        sums[kind] = counted.count
    report = {"seconds": {kind: statistics.median(all_) for kind, all_ in seconds.items()}, "sums": sums}
    Path(spec["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()


def measure(steps: int) -> dict[str, Any]:
    """Return the CPU seconds of a step, the share that layers on plain tensors take, and the sums of a block."""
    answers = run_ranks("benchmarks.tensor_host_time", {"steps": steps}, 2, 200.0)
    seconds = {kind: max(one["seconds"][kind] for one in answers) for kind in ("own", "dtensor")}
    sums = {kind: count / BLOCKS for kind, count in answers[0]["sums"].items()}
    return {"seconds": seconds, "share": seconds["own"] / seconds["dtensor"], "sums_per_block": sums}


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args(argv)
    found = measure(args.steps)
    print(json.dumps(found, indent=1))
    if args.json is not None:
        report = {**circumstances(command_line("tensor_host_time", argv), "cpu"), **found}
        args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        os.environ["SHARDWELL_DEVICE"] = "cpu"
        worker(json.loads(sys.argv[1]))
    else:
        raise SystemExit(main())
