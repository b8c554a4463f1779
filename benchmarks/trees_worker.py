"""One rank of one source tree: what ``benchmarks.trees`` starts, and nobody calls by hand.

It reads one JSON object a line and answers with one: the CPU seconds (of all threads) and the seconds of what it did.
It uses only what engines of all trees have: `initialize`, `forward`, `backward`, `step`, `save_checkpoint` and
`load_checkpoint`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist

import shardwell
from benchmarks.measure import cpu_seconds
from benchmarks.model import PRESETS, Decoder


class Subject:
    """An engine of the tree, and what is measured of it."""

    def __init__(self, size: str, stage: int, seq: int) -> None:
        self._shape, self._seq = PRESETS[size], seq
        torch.manual_seed(0)
        model = Decoder(self._shape)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, folder: str, tag: str) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(0, self._shape.vocab, (1, self._seq + 1), generator=generator)
        self.engine.backward(self.engine(tokens[:, :-1], tokens[:, 1:]))
        self.engine.step()

    def save(self, folder: str, tag: str) -> None:
        self.engine.save_checkpoint(folder, tag)

    def load(self, folder: str, tag: str) -> None:
        self.engine.load_checkpoint(folder, tag)


def timed(action: Callable[[], object]) -> dict[str, Any]:
    gc.collect()
    dist.barrier()
    cpu, begin = cpu_seconds(), time.perf_counter()
    action()
    return {"cpu_seconds": cpu_seconds() - cpu, "seconds": time.perf_counter() - begin}


def main() -> None:
    spec = json.loads(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing but answers goes there
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    subject = Subject(spec["size"], spec["stage"], spec["seq"])
    answers.write(json.dumps({"tree": shardwell.__file__}) + "\n")
    answers.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        do = cast(Callable[[str, str], None], getattr(subject, asked["do"]))
        answers.write(json.dumps(timed(lambda do=do, asked=asked: do(asked["folder"], asked["tag"]))) + "\n")  # type: ignore[misc]
        answers.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
