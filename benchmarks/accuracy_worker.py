"""One rank of the accuracy benchmark: what ``benchmarks.accuracy`` starts, and nobody calls by hand."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LinearLR

import shardwell
from shardwell.cli.demo_model import ByteGpt, rows_of_step, standard_library_text

QWZ, QGZ, HPZ = ({"zero_quantized_weights": True}, {"zero_quantized_gradients": True}, {"zero_hpz_partition_size": 2})
ALL = {**QWZ, **QGZ, **HPZ}
VARIANTS: dict[str, dict[str, Any]] = {  # what each adds to stage 3
    "stage3": {},
    "qwZ": {"zero_optimization": QWZ},
    "qgZ": {"zero_optimization": QGZ},
    "hpZ": {"zero_optimization": HPZ},
    "zero++": {"zero_optimization": ALL},
    "zero++8": {"zero_optimization": ALL, "shardwell": {"codecs": {"between": "int8"}}},
}


@dataclass(frozen=True)
class Lesson:
    """What is learned: the same for every variant."""

    steps: int = 500
    width: int = 64
    num_blocks: int = 3
    num_heads: int = 4
    context: int = 64
    rows: int = 16  # of each step, over all ranks
    tested_rows: int = 256
    learning_rate: float = 3e-3
    ranks_per_node: int = 2
    seed: int = 0


def learned(lesson: Lesson, added: dict[str, Any]) -> dict[str, Any]:
    """The losses of this rank in training, and that on text which was not trained on, before and after.

    Half of the text is for training. Everything is sharded, however small, and in fp32. The learning rate falls to 0:
    what is left in the end is not the noise of the last steps.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_WORLD_SIZE=str(lesson.ranks_per_node), LOCAL_RANK=str(rank % lesson.ranks_per_node))
    torch.manual_seed(lesson.seed)
    model = ByteGpt(lesson.width, lesson.num_blocks, lesson.num_heads, lesson.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lesson.learning_rate)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **added.get("zero_optimization", {})}
    config = {"gradient_clipping": 1.0, **added, "zero_optimization": zero}
    falling = partial(LinearLR, start_factor=1.0, end_factor=0.0, total_iters=lesson.steps)
    engine, *_ = shardwell.initialize(
        model=model, optimizer=optimizer, lr_scheduler=falling, config=config, device="cpu"
    )
    text, length = standard_library_text(), lesson.context + 1
    seen, unseen = text[: len(text) // 2], text[len(text) // 2 :]

    def tested() -> float:
        with torch.no_grad():
            return float(engine(rows_of_step(unseen, 0, lesson.tested_rows, length)))

    before, losses = tested(), []
    for step in range(lesson.steps):
        loss = engine(rows_of_step(seen, step, lesson.rows, length).chunk(size)[rank])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    after = tested()
    engine.destroy()
    return {"before": before, "after": after, "losses": losses}


def main() -> None:
    """Learn what the JSON in argv[1] describes and write the losses beside the other ranks'."""
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = learned(Lesson(**spec["lesson"]), VARIANTS[spec["variant"]])
    Path(spec["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
