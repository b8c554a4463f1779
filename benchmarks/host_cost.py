"""The engine's own Python: microseconds of a block and step, and collectives of a step, with hardly any compute.

    python -m benchmarks.host_cost [--blocks 200] [--ranks 1,2] [--stages 1,2,3] [--steps 5] [--set KEY=VALUE ...]

The decoder is so narrow that an operation costs its dispatch alone, and the ranks are simulated, so that a step costs
what the host does. What a forward and backward of plain PyTorch cost there, with the same checkpointing, is subtracted.
Times are those of the processor, which others on the machine disturb less than the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import shardwell
from benchmarks.model import Decoder, DecoderConfig
from shardwell.parallel import TrafficKind

WARM_UP_STEPS = 1


def median_seconds(step: Callable[[], None], steps: int) -> float:
    """Return the median of the processor time of a step, after some to warm up."""
    for _ in range(WARM_UP_STEPS):
        step()
    seconds = []
    for _ in range(steps):
        begin = time.process_time()
        step()
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds)


def narrow_model(blocks: int) -> tuple[Decoder, torch.Tensor]:
    """Return a decoder that computes next to nothing, and one row of tokens for it."""
    size = DecoderConfig(vocab=64, width=16, blocks=blocks, heads=2, mlp=48, seq=4)
    return Decoder(size, checkpoint=True), torch.zeros(1, size.seq, dtype=torch.long)


def plain_seconds(blocks: int, steps: int) -> float:
    """Return the seconds of a forward and backward of plain PyTorch."""
    model, tokens = narrow_model(blocks)

    def step() -> None:
        model(tokens, tokens).backward()
        model.zero_grad(set_to_none=True)

    return median_seconds(step, steps)


def engine_figures(blocks: int, stage: int, ranks: int, steps: int, more: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of an engine's step as rank 0 of simulated ranks, and its collectives by kind."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        model, tokens = narrow_model(blocks)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": stage},
            "shardwell": {"shard_at_world_one": True, **more},
        }
        engine, *_ = shardwell.initialize(model=model, config=config)

        def step() -> None:
            engine.backward(engine(tokens, tokens))
            engine.step()

        seconds = median_seconds(step, steps)
        calls = {kind.value: num for kind, num in engine.traffic().calls.items() if kind is not TrafficKind.CONTROL}
        return {"seconds": seconds, "units": len(engine.units), "calls": calls}
    finally:
        dist.destroy_process_group()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--ranks", default="1,2", help="numbers of simulated ranks")
    parser.add_argument("--stages", default="1,2,3")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="keys of the shardwell block")
    parser.add_argument("--json", action="store_true", help="print the raw figures")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    args, console = parse(argv), Console(width=140)
    torch.set_num_threads(1)
    blocks, more = args.blocks, {key: json.loads(value) for key, value in (one.split("=") for one in args.set)}
    plain = plain_seconds(blocks, args.steps)
    title = f"{blocks} blocks: plain PyTorch takes {1e6 * plain / blocks:.0f} us for one"
    table = Table(title=title, title_justify="left")
    for heading in ("ranks", "stage", "units", "us/block", "us/unit", "collectives of a step"):
        table.add_column(heading, justify="right" if "of" not in heading else "left")
    raw = []
    for ranks in (int(number) for number in args.ranks.split(",")):
        for stage in (int(number) for number in args.stages.split(",")):
            found = engine_figures(blocks, stage, ranks, args.steps, more)
            own = 1e6 * (found["seconds"] - plain)
            calls = ", ".join(f"{num} {kind}" for kind, num in found["calls"].items()) or "none"
            per_block, per_unit = f"{own / blocks:.0f}", f"{own / found['units']:.0f}"
            table.add_row(str(ranks), str(stage), str(found["units"]), per_block, per_unit, calls)
            raw.append({"ranks": ranks, "stage": stage, "plain_seconds": plain, **found})
    if args.json:
        json.dump(raw, sys.stdout)
    else:
        console.print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
