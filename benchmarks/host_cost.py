"""The engine's own Python: microseconds of a block and step, beside FSDP2's, with hardly any compute.

    python -m benchmarks.host_cost [--blocks 200] [--ranks 1,2] [--rows plain,fsdp2,1,2,3,2:host,3:host] [--steps 15]
                                   [--bf16] [--set KEY=VALUE ...] [--json PATH]

The decoder is so narrow that an operation costs its dispatch alone, and the ranks are simulated, so that a step costs
what the host does. What a forward and backward of plain PyTorch cost there, with the same checkpointing, is subtracted;
what is left has clipping and the optimizer's step in it, also of the row `plain`, which is a loop of PyTorch's own. All
rows live in one process and take their steps in turns. Times are those of the processor (all threads), and the least of
all steps: what others on the machine do only adds to them.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import shardwell
from benchmarks.measure import circumstances, command_line, keep, told
from benchmarks.model import Decoder, DecoderConfig
from shardwell.parallel import TrafficKind

WARM_UP_STEPS = 2
PASSES = "forward and backward"
CLIP, LEARNING_RATE = 1.0, 1e-4
ROWS = "plain,fsdp2,1,2,3,2:host,3:host"


@dataclass
class Row:
    """A model in training; `units` are what an engine all-gathers, by `calls` of each kind in a step."""

    step: Callable[[], None]
    units: int = 0
    calls: Callable[[], dict[str, int]] = dict
    end: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Workload:
    """The size of the model, its precision, and more keys of the block `shardwell`."""

    blocks: int
    bf16: bool
    more: dict[str, Any]

    def model(self) -> tuple[Decoder, torch.Tensor]:
        """Return a decoder that computes next to nothing, and one row of tokens for it."""
        size = DecoderConfig(vocab=64, width=16, blocks=self.blocks, heads=2, mlp=48, seq=4)
        return Decoder(size, checkpoint=True), torch.zeros(1, size.seq, dtype=torch.long)


def row(name: str, work: Workload) -> Row:
    """Build a row by its name: `plain`, `fsdp2`, a stage, or a stage with its optimizer state on the host."""
    if name == PASSES:
        return _plain(work, steps=False)
    if name in ("plain", "fsdp2"):
        return _plain(work) if name == "plain" else _fsdp2(work)
    stage, _, place = name.partition(":")
    return _shardwell(work, int(stage), on_host=place == "host")


def _plain(work: Workload, *, steps: bool = True) -> Row:
    model, tokens = work.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16) if work.bf16 else nullcontext():
            loss = model(tokens, tokens)
        loss.backward()
        if steps:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Row(step)


def _fsdp2(work: Workload) -> Row:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, tokens = work.model()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if work.bf16 else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> None:
        model(tokens, tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Row(step, work.blocks + 1)


def _shardwell(work: Workload, stage: int, *, on_host: bool) -> Row:
    model, tokens = work.model()
    zero: dict[str, Any] = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if on_host else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": work.bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": zero,
        "shardwell": {"shard_at_world_one": True, **work.more},
    }
    engine = shardwell.initialize(model=model, config=config).engine

    def step() -> None:
        engine.backward(engine(tokens, tokens))
        engine.step()

    def calls() -> dict[str, int]:
        return {kind.value: num for kind, num in engine.traffic().calls.items() if kind is not TrafficKind.CONTROL}

    return Row(step, len(engine.units), calls, engine.destroy)


def measure(names: Sequence[str], work: Workload, ranks: int, steps: int) -> dict[str, Any]:
    """Return the figures of some rows as rank 0 of simulated ranks; `own` is what a step takes beside its passes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    rows: dict[str, Row] = {}
    try:
        rows.update((name, row(name, work)) for name in (PASSES, *names))
        gc.collect()
        gc.freeze()  # no row pays for the objects of the others
        seconds: dict[str, list[float]] = {name: [] for name in rows}
        for number in range(WARM_UP_STEPS + steps):
            for name, one in rows.items():
                begin = time.process_time()
                one.step()
                if number >= WARM_UP_STEPS:
                    seconds[name].append(time.process_time() - begin)
        least = {name: min(found) for name, found in seconds.items()}
        return {
            name: {
                "seconds": least[name],
                "own_us_per_block": 1e6 * (least[name] - least[PASSES]) / work.blocks,
                "units": one.units,
                "calls": one.calls(),
                "all": seconds[name],
            }
            for name, one in rows.items()
        }
    finally:
        for one in rows.values():
            one.end()
        gc.unfreeze()
        dist.destroy_process_group()


def _table(found: dict[str, Any], ranks: int, blocks: int) -> Table:
    passes = 1e6 * found[PASSES]["seconds"] / blocks
    title = f"{ranks} rank(s), {blocks} blocks: a forward and backward of plain PyTorch takes {passes:.0f} us for one"
    table = Table(title=title, title_justify="left")
    for heading in ("row", "ms/step", "own us/block", "of FSDP2's", "units", "own us/unit", "collectives of a step"):
        table.add_column(heading, justify="left" if heading in ("row", "collectives of a step") else "right")
    peer = found.get("fsdp2", {}).get("own_us_per_block")
    for name, one in found.items():
        own, units = one["own_us_per_block"], one["units"]
        table.add_row(
            name if name[0].isalpha() else f"stage {name}",
            f"{1e3 * one['seconds']:.1f}",
            f"{own:.0f}",
            f"{own / peer:.2f}" if peer else "",
            str(units or ""),
            f"{own * blocks / units:.0f}" if units else "",
            ", ".join(f"{num} {kind}" for kind, num in one["calls"].items()),
        )
    return table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--ranks", default="1,2", help="numbers of simulated ranks")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="keys of the shardwell block")
    parser.add_argument("--json", help="where the raw figures go; '-': nowhere")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table for each number of ranks, and keep the raw figures."""
    args, console = parse(argv), Console(width=140)
    torch.set_num_threads(1)
    more = {key: json.loads(value) for key, value in (one.split("=") for one in args.set)}
    work, found = Workload(args.blocks, args.bf16, more), {}
    for ranks in (int(number) for number in args.ranks.split(",")):
        found[str(ranks)] = measure(args.rows.split(","), work, ranks, args.steps)
        console.print(_table(found[str(ranks)], ranks, args.blocks))
    report = {**circumstances(command_line("host_cost", argv), "cpu"), "found": found}
    console.print(told(report))
    if (path := keep(report, "host-cost", args.json)) is not None:
        console.print(f"raw results: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
