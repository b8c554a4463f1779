"""Three models of the literature in their published layouts, each as one rank of a simulated cluster.

    python -m benchmarks.case_studies [--only NAME,...] [--json PATH]

Nothing is allocated or sent: the model is on the meta device, and the process group is torch's fake one. The engine's
own counters give the bytes at rest and the bytes that the rank receives in a step, beside the formulas of
`docs/memory-and-traffic.md` and what was published. Of many micro-batches 8 are run: the traffic of the tensor and pipe
axes grows with their number, and the rest does not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

GB = 1e9
MOST_MICRO_BATCHES = 8  # that are run
PLAN = {
    **{f"*.attention.{name}": "colwise" for name in ("query", "key", "value")},
    "*.attention.out": "rowwise",
    "*.up": "colwise",
    "*.down": "rowwise",
    "0": "embedding_rowwise",
}


@dataclass(frozen=True)
class CaseStudy:
    """A model and the layout that it was trained in."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    rows: int  # of a micro-batch
    micro_batches: int
    tensor: int
    pipe: int
    data: int
    stage: int
    rank: int  # that is simulated
    published: str

    @property
    def ranks(self) -> int:
        """The number of ranks of the cluster."""
        return self.tensor * self.pipe * self.data

    @property
    def simulated(self) -> int:
        """The number of micro-batches that are run."""
        return min(self.micro_batches, MOST_MICRO_BATCHES)


CASES = (
    CaseStudy(
        "turing-nlg-17b", 78, 4256, 28, 51200, 1024, 8, 1, 4, 1, 64, 1, 5,
        "17B, 256 V100 (32 GB) at batch 512; ZeRO lets 4 tensor ranks do where Megatron alone needs 16 and 1024 GPUs",
    ),
    CaseStudy(
        "bloom-176b", 70, 14336, 112, 250880, 2048, 2, 128, 4, 12, 8, 1, 5 * 32 + 9,
        "176B, 384 A100 (80 GB), about 60 GB used on each; weights in bf16 329 GB, with optimizer states 2.3 TB",
    ),
    CaseStudy(
        "mt-nlg-530b", 105, 20480, 128, 51200, 2048, 1, 240, 8, 35, 8, 1, 17 * 64 + 13,
        "530B, 280 A100 (80 GB) a replica, 2240 in all: batch 1920 in 60.1 s",
    ),
)  # fmt: skip


class Attention(nn.Module):
    """Causal attention whose number of heads follows from the projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the heads attend to."""
        found = [one(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for one in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*found, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states behind the block."""
        x = x + self.attention(self.norm1(x))
        output: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return output


def built(case: CaseStudy) -> nn.Sequential:
    """Return the model on the meta device: embedding, blocks, norm and output layer, which is the embedding."""
    with torch.device("meta"):
        blocks = [Block(case.width, case.heads) for _ in range(case.layers)]
        head = nn.Sequential(nn.LayerNorm(case.width), nn.Linear(case.width, case.vocabulary, bias=False))
        words = nn.Embedding(case.vocabulary, case.width)
        head[1].weight = words.weight  # tied, as in all three
        return nn.Sequential(words, *blocks, head)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def batches(case: CaseStudy) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield micro-batches without values."""
    while True:
        ids = torch.empty(case.rows, case.sequence, dtype=torch.int64, device="meta")
        yield ids, ids


def config_of(case: CaseStudy) -> dict[str, Any]:
    """Return the configuration of a case study."""
    return {
        "train_micro_batch_size_per_gpu": case.rows,
        "gradient_accumulation_steps": case.simulated,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": case.stage},
        "tensor_parallel": {
            "autotp_size": case.tensor,
            "plan": {**PLAN, f"{case.layers + 1}.1": "colwise_gather_output"},
        },
        **({"pipeline": {"stages": case.pipe, "partition": "uniform"}} if case.pipe > 1 else {}),
    }


def simulate(case: CaseStudy) -> dict[str, Any]:
    """Train one step as one rank of the cluster; return its bytes, and those of the formulas."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import shardwell

    begin = time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.ranks)
    model: Any = built(case)
    whole = sum(parameter.numel() for parameter in model.parameters())
    if case.pipe > 1:
        model = shardwell.pipeline.split(model, loss_fn=loss_of)
    engine: Any = shardwell.initialize(model=model, config=config_of(case), device="meta").engine
    rows = batches(case)
    if case.pipe > 1:
        engine.expect_hidden(torch.empty(case.rows, case.sequence, case.width, dtype=torch.bfloat16, device="meta"))
        engine.train_batch(rows)
    else:
        for _ in range(case.simulated):
            ids, targets = next(rows)
            engine.backward(loss_of(engine(ids), targets))
            engine.step()
    held = sum(parameter.numel() for parameter in engine.module.parameters())
    blocks = sum(isinstance(module, Block) for module in engine.module.modules())
    found = {
        "case": asdict(case),
        "parameters": whole,
        "parameters_of_rank": held,
        "blocks_of_rank": blocks,
        "bytes_at_rest": engine.memory().total(),
        "formula_at_rest": 2 * held + 10 * held / case.data,
        "traffic": {str(axis): int(value) for axis, value in engine.traffic().by_axis().items()},
        "formula_traffic": formula_of_traffic(case, held, blocks, case.simulated),
        "formula_of_whole_step": formula_of_traffic(case, held, blocks, case.micro_batches),
        "seconds": time.perf_counter() - begin,
    }
    dist.destroy_process_group()
    return found


def formula_of_traffic(case: CaseStudy, held: int, blocks: int, micro_batches: int) -> dict[str, float]:
    """Return the bytes that the rank receives in a step, by axis; gradients of several micro-batches are fp32."""
    hidden = micro_batches * case.rows * case.sequence * case.width * 2
    sums = 4 * blocks
    gradient = 4 if micro_batches > 1 else 2
    found = {"data": (2 + gradient) * held * (case.data - 1) / case.data}
    found["tensor"] = sums * 2 * (case.tensor - 1) / case.tensor * hidden
    if case.pipe == 1:  # the embedding's sum, the output layer's input gradient, and its outputs of the other ranks
        logits = micro_batches * case.rows * case.sequence * case.vocabulary * 2
        found["tensor"] += (case.tensor - 1) / case.tensor * (2 * 2 * hidden + logits)
    return {**found, "pipe": 2.0 * hidden} if case.pipe > 1 else found


def table_of(found: Sequence[dict[str, Any]]) -> Table:
    """Return the figures of all case studies."""
    table = Table(title="one rank of each cluster, GB: measured (formula)", title_justify="left")
    headings = ("model", "layout", "parameters", "of the rank", "at rest", "data", "tensor", "pipe", "whole step", "s")
    for heading in headings:
        table.add_column(heading)
    for one in found:
        case, traffic, formula = one["case"], one["traffic"], one["formula_traffic"]
        layout = f"tp{case['tensor']} x pp{case['pipe']} x dp{case['data']}"
        moved = [
            f"{traffic.get(axis, 0) / GB:.2f} ({formula.get(axis, 0.0) / GB:.2f})"
            for axis in ("data", "tensor", "pipe")
        ]
        rest = f"{one['bytes_at_rest'] / GB:.2f} ({one['formula_at_rest'] / GB:.2f})"
        sizes = f"{one['parameters'] / 1e9:.1f}B", f"{one['parameters_of_rank'] / 1e6:.0f}M"
        step = f"{sum(one['formula_of_whole_step'].values()) / GB:.0f}"
        table.add_row(case["name"], layout, *sizes, rest, *moved, step, f"{one['seconds']:.1f}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print a table, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, with commas")
    parser.add_argument("--json", type=Path, help="where the figures go")
    args, console = parser.parse_args(argv), Console(width=150)
    found = [simulate(case) for case in CASES if not args.only or case.name in args.only.split(",")]
    console.print(table_of(found))
    for case in CASES:
        console.print(f"{case.name}: {case.published}", highlight=False)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
