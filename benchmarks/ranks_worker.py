"""One rank of several contenders that take turns in the same processes: what ``benchmarks.ranks --together`` starts.

To start ranks and import torch takes longer than most contenders' steps, so this measures many more of them in the same
time. Each turn builds a contender, times it, and drops it with its memory. All ranks leave out the rest together when
the time is over or one of them has failed. What was measured is written after each turn, so a run that is cut off
leaves it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import (
    GPU_CONTENDERS,
    ONLY_BY_NAME,
    RANK_CONTENDERS,
    EngineTrainer,
    Trainer,
    Workload,
    by_name,
)
from benchmarks.gpu_worker import begin, timing_pass

EVERY = (*RANK_CONTENDERS, *GPU_CONTENDERS, *ONLY_BY_NAME)  # of two with the same name, the first


def any_rank(flag: bool, device: str) -> bool:
    """Return whether the flag is set on any rank."""
    told = torch.tensor([float(flag)], device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told.item())


def drop(trainer: Trainer | None) -> None:
    """Let go of an engine's memory and process groups."""
    if isinstance(trainer, EngineTrainer):
        trainer.engine.destroy()


def allocate_workspaces(device: str) -> int:
    """Multiply matrices forward and backward, and return the bytes that cuBLAS keeps from then on.

    Or the first contender would have them in its peak, and the others would not.
    """
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.ones(16, 16, dtype=dtype, device=device, requires_grad=True)
        (matrix @ matrix).sum().backward()
    del matrix
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def turn(name: str, workload: Workload, steps: int, warm_up: int, workspaces: int) -> dict[str, Any]:
    """Build a contender, time its steps, and drop it; peaks are without what earlier contenders have left behind."""
    gc.collect()
    before = 0
    if workload.device == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated() - workspaces
    trainer = by_name(EVERY, name).build(workload)
    found = timing_pass(trainer, workload, steps, warm_up, each=False)
    drop(trainer)
    for key in ("peak_allocated", "rest_allocated"):
        if found[key] is not None:
            found[key] -= before
    return {**found, "allocated_before": before}


def turns(spec: dict[str, Any]) -> list[str]:
    """Return the names of all turns in order: each round has each contender, every other round backwards."""
    return [
        name
        for number in range(spec["rounds"])
        for name in (spec["contenders"] if number % 2 == 0 else spec["contenders"][::-1])
    ]


def main() -> None:
    """Run the turns that the JSON in argv[1] describes."""
    spec, began = json.loads(sys.argv[1]), time.monotonic()
    workload = begin(spec)
    device = workload.device
    tempfile.tempdir = spec["folder"]  # which the launcher removes; all ranks have the same
    found: dict[str, Any] = {name: {"rounds": [], "error": None} for name in spec["contenders"]}
    workspaces = allocate_workspaces(device)
    for name in turns(spec):
        if any_rank(time.monotonic() - began > spec["seconds"], device):
            break
        if found[name]["error"] is None:
            try:
                found[name]["rounds"].append(turn(name, workload, spec["steps"], spec["warm_up"], workspaces))
                error = None
            except Exception as problem:  # the row says so, and the others go on if this rank's peers failed, too
                error = f"failed: {type(problem).__name__}: {problem}"[:200]
            if any_rank(error is not None, device):
                found[name]["error"] = error or "failed on another rank"
        for folder in (spec["folder"], spec["kept"]):
            written = Path(folder, f"{dist.get_rank()}.part")
            written.write_text(json.dumps(found))
            os.replace(written, written.with_suffix(".json"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
