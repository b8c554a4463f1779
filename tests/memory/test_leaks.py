"""No step leaves anything behind: live bytes stay as they are, for every codec at every hop and tier.

Each of these meets every stage and both ways to accumulate.

One process is one of four ranks, whose peers are simulated on the CPU: they send what this rank sends. So everything
goes the library's route, as on NCCL: what follows a hop is begun at once, and no host waits in between.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwell
from tests.support.live_bytes import live_bytes
from tests.support.models import zero
from tests.support.pairwise import covering
from tests.support.patience import soon
from tests.support.ranks import Ranks

STEPS = 16  # twelve settled ones: four bytes that each keeps are more than SCALARS
SETTLED = 4  # steps after which a run holds what it holds
SCALARS = 40  # bytes: less than a scalar a step, of which some come and go
RANK, NUM_RANKS = 1, 4
WIDTH = 32  # weight and bias divide by four ranks: simulated peers send padding where numbers are expected

CODECS: dict[str, dict[str, Any]] = {
    "none": {},
    "qgZ": {"zero_quantized_gradients": True},
    "qwZ": {"zero_quantized_weights": True},
}
HOPS = {"one node": 4, "nodes": 2, "hpZ": 2}  # ranks of a node
TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Run:
    stage: int
    codec: str
    hop: str
    tier: str
    accumulation: int

    @property
    def is_one(self) -> bool:
        """Whether a configuration can say it: gradients travel in shards from stage 2 on, weights at stage 3."""
        needs = {"none": 0, "qgZ": 2, "qwZ": 3}[self.codec]
        return self.stage >= (3 if self.hop == "hpZ" else needs)

    def config(self, path: str) -> dict[str, Any]:
        block = {**CODECS[self.codec], **({"zero_hpz_partition_size": 2} if self.hop == "hpZ" else {})}
        device = {"device": "cpu"} if self.tier == "host" else {"device": "nvme", "nvme_path": path}
        if self.tier != "device":
            block["offload_optimizer"] = device
            if self.stage == 3:
                block["offload_param"] = {**device, "max_in_cpu": 0}
        config = zero(self.stage, zero_optimization=block, bf16={"enabled": True})
        return {**config, "gradient_accumulation_steps": self.accumulation, "aio": {"block_size": 8192}}


ALL = [
    run for run in itertools.starmap(Run, itertools.product((0, 1, 2, 3), CODECS, HOPS, TIERS, (1, 2))) if run.is_one
]
RUNS = covering(ALL, ("codec", "hop", "tier"), ("stage", "tier", "accumulation"))


def held(run: Run, path: str) -> list[tuple[int, int]]:
    """After each step: bytes in the engine's books, and bytes of live storages (where they are counted)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ["SHARDWELL_IO"] = "threads"  # without measuring which engine is the fastest
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=NUM_RANKS)
    of = HOPS[run.hop]
    os.environ.update(LOCAL_WORLD_SIZE=str(of), LOCAL_RANK=str(RANK % of))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=run.config(path)).engine
    x = torch.randn(2, WIDTH)
    found, num_steps = [], STEPS
    for step in range(num_steps):
        for _ in range(run.accumulation):
            engine.backward(engine(x).square().mean())
            engine.step()
        book, live = found[SETTLED] if step > SETTLED else (0, -SCALARS)
        is_looked_at = step in (SETTLED, num_steps - 1)
        book = settled(lambda: engine.memory().total(), book)
        found.append((book, settled(live_bytes, live + SCALARS) if is_looked_at else 0))
    engine.destroy()
    return found


def settled(count: Callable[[], int], expected: int) -> int:
    """Bytes by this count, once threads that bring gradients down and state back have given up what they hold.

    They are waited for until there are no more than expected, or for a moment if it is not known what to expect.
    """
    total = count()
    deadline = time.monotonic() + (soon(5.0) if expected else 0.05)
    while total > expected and time.monotonic() < deadline:
        time.sleep(0.002)
        total = min(total, count())
    return total


@pytest.mark.parametrize(
    "run", RUNS, ids=lambda run: f"{run.stage}-{run.codec}-{run.hop}-{run.tier}-{run.accumulation}"
)
def test_steps_hold_what_the_first_ones_hold(ranks: Ranks, tmp_path: Path, run: Run) -> None:
    found = ranks.run(1, held, run, str(tmp_path))[0]
    books = [book for book, _ in found[SETTLED:]]
    assert max(books) == books[0]
    assert found[-1][1] - found[SETTLED][1] <= SCALARS
