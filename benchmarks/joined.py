"""One collective for a unit, whatever groups it has, against one for each group: seconds of a step, launches, bits.

    python -m benchmarks.joined [--ranks 2] [--shapes wide,narrow] [--steps 8] [--device cuda] [--json PATH]

A model as LoRA makes it: each block has frozen bf16 matrices, fp32 adapters and norms, and a bf16 gate that trains, so
that it has three groups, of which two are reduced. Two engines over equal models take their steps in turns in the same
processes; in one of them each group has a collective of its own. With --device cuda the ranks are NCCL ranks that
share one GPU, as in benchmarks.ranks, and what NCCL launches is counted by torch's profiler. The program fails if a bit
of what was trained differs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import shardwell
from benchmarks.launch import run_ranks
from benchmarks.measure import circumstances, command_line, keep, told
from shardwell.parallel import TrafficKind

SHAPES = {"wide": (1024, 16, 16), "narrow": (128, 100, 4), "tiny": (16, 3, 2)}  # width, blocks, rank of the adapters
WARM_UP, ROWS, LIMIT = 3, 256, 200.0
WAYS = ("a collective for each group", "one for the unit")
KINDS = (TrafficKind.ALL_GATHER, TrafficKind.REDUCE_SCATTER, TrafficKind.PUBLISH)


class Block(nn.Module):
    """A frozen MLP with an adapter, a norm and a gate."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(2 * width, width, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.gate = nn.Parameter(torch.ones(2 * width, dtype=torch.bfloat16))
        self.norm = nn.LayerNorm(width)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the frozen weights and the adapter add."""
        normed = self.norm(x)
        return x + self.down(torch.tanh(self.up(normed.bfloat16())) * self.gate).float() + self.b(self.a(normed))


def engine_of(shape: str, device: torch.device, *, joined: bool, stage: int = 3) -> shardwell.Engine:
    """Return an engine with a unit for each block."""
    width, blocks, rank = SHAPES[shape]
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width, rank) for _ in range(blocks)]).to(device)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": zero, "shardwell": {"bundle_size": 0}, "train_micro_batch_size_per_gpu": ROWS}
    engine: shardwell.Engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
    if not joined:
        for unit in engine._scheduler.units:
            unit.sets = replace(unit.sets, joins_gathers=False, joins_reductions=False)
    return engine


def launches(step: Any) -> int:
    """Return the kernels of NCCL's that a step runs on this rank."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in profiler.key_averages() if "ncclDevKernel" in event.key)


def worker(spec: dict[str, Any]) -> None:
    """Train on this rank, in both ways in turns."""
    on_gpu = spec["device"] == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    result: dict[str, Any] = {}
    for shape in spec["shapes"]:
        engines = {way: engine_of(shape, device, joined=way == WAYS[1]) for way in WAYS}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        host: dict[str, list[float]] = {way: [] for way in WAYS}  # of the processor, all threads

        def step(engine: shardwell.Engine, number: int, width: int = SHAPES[shape][0]) -> None:
            generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
            engine.backward(engine(torch.randn(ROWS, width, generator=generator).to(device)).square().mean())
            engine.step()

        for number in range(WARM_UP + spec["steps"]):
            for way, engine in engines.items():
                dist.barrier()
                if on_gpu:
                    torch.cuda.synchronize()
                begin, worked = time.perf_counter(), time.process_time()
                step(engine, number)
                if on_gpu:
                    torch.cuda.synchronize()
                if number >= WARM_UP:
                    seconds[way].append(time.perf_counter() - begin)
                    host[way].append(time.process_time() - worked)
        last = WARM_UP + spec["steps"]
        found = result[shape] = {way: {"seconds": seconds[way], "host": host[way]} for way in WAYS}
        values = []
        for way, engine in engines.items():
            calls = engine.traffic().calls
            found[way]["calls"] = {kind.value: calls.get(kind, 0) for kind in KINDS}
            found[way]["launches"] = launches(partial(step, engine, last)) if on_gpu else None
            state = engine.state_dict()
            values.append({name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)})
        same = all(torch.equal(tensor, values[1][name]) for name, tensor in values[0].items())
        if not (same and values[0]):
            raise SystemExit(f"{shape}: bits differ")
        for engine in engines.values():
            engine.destroy()
    Path(spec["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", default="wide,narrow", help=", ".join(SHAPES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", help="where the raw figures go; '-': nowhere")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, print a table, and keep the raw figures."""
    args, console = parse(argv), Console(width=120)
    spec = {"shapes": args.shapes.split(","), "steps": args.steps, "device": args.device}
    found = run_ranks("benchmarks.joined", spec, args.ranks, LIMIT, args.device)
    table = Table(title=f"{args.ranks} ranks, stage 3, {args.device}: the same bits", title_justify="left")
    for heading in ("model", "collectives", "ms/step", "least", "CPU ms", "NCCL kernels", "calls"):
        table.add_column(heading, justify="left" if heading in ("model", "collectives", "calls") else "right")
    for shape, ways in found[0].items():
        for way, one in ways.items():
            slowest = [max(each) for each in zip(*(rank[shape][way]["seconds"] for rank in found), strict=True)]
            table.add_row(
                shape,
                way,
                f"{1e3 * statistics.median(slowest):.1f}",
                f"{1e3 * min(slowest):.1f}",
                f"{1e3 * min(one['host']):.1f}",
                str(one["launches"] or "-"),
                ", ".join(f"{number} {kind}" for kind, number in one["calls"].items() if number),
            )
    console.print(table)
    report = {**circumstances(command_line("joined", argv), args.device), "ranks": found}
    console.print(told(report), highlight=False)
    if (path := keep(report, "joined", args.json)) is not None:
        console.print(f"raw results: {path}")
    return 0


if __name__ == "__main__":
    if "RANK" in os.environ and len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        worker(json.loads(sys.argv[1]))
        raise SystemExit(0)
    raise SystemExit(main())
