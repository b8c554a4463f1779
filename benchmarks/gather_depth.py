"""How many units ahead an all-gather should start: a step's time at each depth, in the virtual time of a simulation.

    python -m benchmarks.gather_depth [--depths 1,2,3,4,8] [--links 1.8,6,12,50] [--json PATH]

The engine runs on the meta device as one of 8 ranks over links of so many GB/s; figures of an H200 price its kernels.
`even` is a decoder, whose units are alike. In `uneven` three units that compute much and have few bytes are followed by
one of many bytes that computes little, as experts or a wide layer for few tokens would: where the time of a unit's
compute says least about the time of the next all-gather. All depths have the same collectives, and no limit of memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.measure import circumstances, command_line, keep, told
from benchmarks.model import BASE, Decoder
from shardwell.engine import scheduler_setup
from shardwell.memory.machine import SimulatedRanks
from shardwell.plan import SimulatedMachine, estimate
from shardwell.plan.devices import gpu, speeds_of

RANKS, ROWS, TOKENS, WIDTH = 8, 4, 4096, 1024
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": ROWS,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 10**10,
        "leaf_module": {"classes": ["Busy", "Heavy"]},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "shardwell": {"bundle_size": 0},
}


class Busy(nn.Module):
    """A layer that uses one matrix many times, for all tokens."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.linear, self.repeats = nn.Linear(WIDTH, WIDTH, bias=False), repeats

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens after all products."""
        for _ in range(self.repeats):
            x = torch.tanh(self.linear(x))
        return x


class Heavy(nn.Module):
    """Large matrices for a few tokens of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH, bias=False), nn.Linear(16 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens, of which few have changed."""
        return torch.cat([x[:, :16] + self.down(torch.tanh(self.up(x[:, :16]))), x[:, 16:]], 1)


class Uneven(nn.Module):
    """Units of both kinds in turns."""

    def __init__(self, rounds: int = 4, busy: int = 3, repeats: int = 24) -> None:
        super().__init__()
        kinds: list[Callable[[], nn.Module]] = [*([partial(Busy, repeats)] * busy), Heavy]
        self.blocks = nn.ModuleList(one() for _ in range(rounds) for one in kinds)

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def seconds(shape: str, link: float, depth: int) -> float:
    """Return the seconds of a step, with all-gathers so many units ahead."""
    rates = replace(speeds_of(gpu("h200")), inside=link * 1e9, between=link * 1e9)
    ranks = SimulatedRanks(0, RANKS, 1)
    machine = SimulatedMachine(gpu("h200").memory_bytes, speeds=rates, ranks=ranks)
    with torch.device("meta"):
        config = CONFIG
        if shape == "even":
            config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "leaf_module": {}}}
            model: nn.Module = Decoder(replace(BASE, blocks=10), checkpoint=True)
            tokens = torch.empty(ROWS, BASE.seq, dtype=torch.long)
            inputs: tuple[Tensor, ...] = (tokens, tokens)
        else:
            model, inputs = Uneven(), (torch.empty(ROWS, TOKENS, WIDTH, dtype=torch.bfloat16),)
    before = scheduler_setup._MOST_AHEAD
    scheduler_setup._MOST_AHEAD = depth
    try:
        plan = estimate(model, config, machine, inputs=inputs)
    finally:
        scheduler_setup._MOST_AHEAD = before
    assert plan.time is not None
    return plan.time.seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate all depths, print a table, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="1,2,3,4,8")
    parser.add_argument("--links", default="1.8,6,12,50", help="GB/s that a rank receives")
    parser.add_argument("--json", help="where the raw figures go; '-': nowhere")
    args, console = parser.parse_args(argv), Console(width=120)
    depths = [int(one) for one in args.depths.split(",")]
    table = Table(title=f"ms a step, {RANKS} ranks, by units ahead", title_justify="left")
    for heading in ("units", "link GB/s", *map(str, depths)):
        table.add_column(heading, justify="right")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for shape in ("even", "uneven"):
        for link in (float(one) for one in args.links.split(",")):
            times = {str(depth): seconds(shape, link, depth) for depth in depths}
            found.setdefault(shape, {})[str(link)] = times
            table.add_row(shape, f"{link:g}", *(f"{1e3 * time:.2f}" for time in times.values()))
    console.print(table)
    report = {**circumstances(command_line("gather_depth", argv), "cpu"), "seconds": found}
    console.print(told(report), highlight=False)
    if (path := keep(report, "gather-depth", args.json)) is not None:
        console.print(f"raw results: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
