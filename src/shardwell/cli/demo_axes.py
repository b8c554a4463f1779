"""`shardwell demo --3d`: trains one small model in several layouts of the same ranks, and compares them.

Run as a module it is one rank. Rank 0 writes one JSON object per layout to the file that the command reads.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

NUM_RANKS = 8
_ROWS = 2  # of a micro-batch
_NUM_MICRO_BATCHES = 8  # of a step, over all ranks
_CONTEXT = 64
_TOLERANCE = 1e-3  # as between stages: roundings of fp32
_PLAN = {
    "blocks.*.qkv": "packed_colwise:3",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


@dataclass(frozen=True)
class AxesLayout:
    """The ranks along each axis, and the ZeRO stage."""

    pipe: int
    tensor: int
    data: int
    stage: int

    def __str__(self) -> str:
        axes = {"pipeline": self.pipe, "tensor": self.tensor, "data": self.data}
        return " x ".join(f"{size} ({axis})" for axis, size in axes.items() if size > 1)


def layouts_of(ranks: int) -> list[AxesLayout]:
    """Return the layouts that are compared: the data axis alone, then with one other axis, then with both."""
    found = [AxesLayout(1, 1, ranks, 3), AxesLayout(1, 2, ranks // 2, 3), AxesLayout(2, 1, ranks // 2, 1)]
    return [*found, AxesLayout(2, 2, ranks // 4, 1)]


@dataclass(frozen=True)
class LayoutResult:
    """The measurements of one layout: bytes on the rank where they are largest."""

    layout: dict[str, int]
    losses: list[float]
    at_rest: int
    received: dict[str, int]  # in a step, by axis
    seconds: float


def run(ranks: int, steps: int, out: Path, console: Console) -> bool:
    """Train in all layouts, print what was measured, and return whether the losses agree."""
    from shardwell.cli.failures import exit_like_ranks
    from shardwell.cli.launch import LaunchTopology, launch
    from shardwell.cli.temporary_folder import kept_folder

    shown = ", ".join(str(layout) for layout in layouts_of(ranks))
    console.print(f"training a byte-level GPT on {ranks} CPU ranks as {shown}")
    with kept_folder("shardwell-demo-") as folder:
        events = Path(folder, "events.jsonl")
        events.touch()
        job = json.dumps({"steps": steps, "events": str(events)})
        with exit_like_ranks():
            launch(["-m", "shardwell.cli.demo_axes", job], LaunchTopology(ranks), quiet_ranks=True)
        results = [LayoutResult(**json.loads(line)) for line in events.read_text(encoding="utf-8").splitlines()]
    furthest = max(
        abs(a - b) for one in results for a, b in zip(one.losses, results[0].losses, strict=True)
    )  # of the first layout's
    console.print(_table(results))
    agrees = furthest <= _TOLERANCE
    first = results[0].losses
    word = ("pass", "bold green") if agrees else ("FAIL", "bold red")
    fell = f"loss {first[0]:.3f} → {first[-1]:.3f} in {len(first)} steps; "
    console.print(
        Text(f"{fell}between layouts it differs by at most {furthest:.1e} ({_TOLERANCE:.0e}): ").append(*word)
    )
    out.mkdir(parents=True, exist_ok=True)
    numbers = {"ranks": ranks, "difference": furthest, "agrees": agrees, "layouts": [asdict(one) for one in results]}
    (out / "demo-3d.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    console.print(f"numbers: {out / 'demo-3d.json'}")
    return agrees


def _table(results: list[LayoutResult]) -> Table:
    from shardwell.memory.statistics import human

    table = Table(title="bytes per rank, where they are largest", title_justify="left")
    for heading in ("layout", "stage", "at rest", "data axis", "tensor axis", "pipe axis", "s/step"):
        table.add_column(heading, justify="left" if heading == "layout" else "right")
    for one in results:
        moved = [human(one.received.get(axis, 0)) for axis in ("data", "tensor", "pipe")]
        layout = AxesLayout(**one.layout)
        speed = f"{one.seconds / len(one.losses):.2f}"
        table.add_row(str(layout), str(layout.stage), human(one.at_rest), *moved, speed)
    return table


# --- one rank ---------------------------------------------------------------------------------------------------


def train(layout: AxesLayout, steps: int, text: Any) -> LayoutResult:
    """Train in one layout, from the seed to the last step."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F

    import shardwell
    from shardwell.cli.demo_model import ByteLogits, rows_of_step

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def micro_batches(step: int, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rows = rows_of_step(text, step, _ROWS * _NUM_MICRO_BATCHES, _CONTEXT + 1)
        for one in rows.chunk(_NUM_MICRO_BATCHES)[rank :: layout.data]:
            yield one[:, :-1], one[:, 1:]

    torch.manual_seed(0)
    model: Any = ByteLogits(width=64, num_blocks=4, context=_CONTEXT)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": _ROWS,
        "gradient_accumulation_steps": _NUM_MICRO_BATCHES // layout.data,
        "zero_optimization": {"stage": layout.stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
    }
    if layout.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tensor, "plan": _PLAN}
    if layout.pipe > 1:
        config["pipeline"] = {"stages": layout.pipe}
        model = shardwell.pipeline.split(model, loss_fn=loss_of)
    engine: Any = shardwell.initialize(model=model, config=config, device="cpu").engine
    losses, began = [], time.perf_counter()
    for step in range(steps):
        batches = micro_batches(step, engine.data_rank)
        if layout.pipe > 1:
            losses.append(float(engine.train_batch(batches)))
            continue
        total = torch.zeros((), dtype=torch.float64)
        for inputs, targets in batches:
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            total += loss.detach().double() / _NUM_MICRO_BATCHES
        dist.all_reduce(total)
        losses.append(float(total) / layout.tensor)
    axes = engine.traffic().by_axis()
    sizes = torch.tensor([engine.memory().total(), *(axes.get(axis, 0) for axis in ("data", "tensor", "pipe"))])
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    rest, *moved = sizes.tolist()
    engine.destroy()
    received = dict(zip(("data", "tensor", "pipe"), moved, strict=True))
    return LayoutResult(asdict(layout), losses, rest, received, time.perf_counter() - began)


def main() -> None:
    """Train in all layouts as one rank."""
    import torch.distributed as dist

    from shardwell.cli.demo_model import standard_library_text

    job = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    text = standard_library_text()
    for layout in layouts_of(dist.get_world_size()):
        found = train(layout, job["steps"], text)
        if dist.get_rank() == 0:
            with open(job["events"], "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(found)) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
