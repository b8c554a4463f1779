"""What the campaign trains: a small model with dropout, a schedule and accumulation, saved every few steps.

    shardwell run -n 2 --max-restarts 9 tests/campaigns/kills_script.py FOLDER STAGE TIER PAUSE

FOLDER/go-<life>         the script waits for it before it loads anything
FOLDER/met-<life>-<rank> the rank has met the others
FOLDER/stop-at           after how many steps to end; it goes on until there is one
FOLDER/checkpoints       what it saves and goes on from
FOLDER/drive             what rests on disk, if TIER is "nvme"; FOLDER is the working directory then
FOLDER/samples-<rank>    one line for each micro-step: its number, the samples of its batch, and its loss
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import shardwell

FOLDER, STAGE, TIER, PAUSE = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
LIFE = os.environ.get("CAMPAIGN_LIFE") or os.environ["TORCHELASTIC_RESTART_COUNT"]
SAMPLES, WIDTH = 101, 16  # no multiple of anything
SAVE_EVERY = 3
BELOW = {"device": TIER, **({"nvme_path": "drive"} if TIER == "nvme" else {})}
OFFLOAD: dict[str, Any] = {} if TIER == "device" else {"offload_optimizer": BELOW}
if OFFLOAD and STAGE == 3:
    OFFLOAD["offload_param"] = {**BELOW, "max_in_cpu": 0}
CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": STAGE, "stage3_param_persistence_threshold": 0, **OFFLOAD},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}},
    "shardwell": {"keep_last": 10},
}


class Samples(Dataset[tuple[int, Tensor]]):
    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.rows[index]


def model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))


def batches(loader: shardwell.engine.data_loader.ShardedLoader) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def shall_stop(steps: int) -> bool:
    """Rank 0 looks; all ranks do as it says."""
    verdict = torch.zeros(())
    if dist.get_rank() == 0 and (FOLDER / "stop-at").exists():
        verdict.fill_(steps >= int((FOLDER / "stop-at").read_text() or sys.maxsize))
    dist.broadcast(verdict, 0)
    return bool(verdict)


def main() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    engine, _, loader, _ = shardwell.initialize(model=model(), config=CONFIG, training_data=Samples())
    (FOLDER / f"met-{LIFE}-{engine.global_rank}").touch()
    while not (FOLDER / f"go-{LIFE}").exists():
        time.sleep(0.01)
    engine.load_checkpoint(FOLDER / "checkpoints")
    log = os.open(FOLDER / f"samples-{engine.global_rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for samples, rows in batches(loader):
        number = engine.micro_steps
        loss = nn.functional.mse_loss(engine(rows), rows)
        engine.backward(loss)
        engine.step()
        record = {"step": number, "samples": samples.tolist(), "loss": loss.item().hex()}
        os.write(log, f"{json.dumps(record)}\n".encode())
        os.fsync(log)
        time.sleep(PAUSE)
        steps = engine.global_steps
        if engine.micro_steps == steps * engine.gradient_accumulation_steps():
            if steps % SAVE_EVERY == 0:
                engine.save_checkpoint(FOLDER / "checkpoints", asynchronous=steps % (2 * SAVE_EVERY) == 0)
            if shall_stop(steps):
                break
    engine.save_checkpoint(FOLDER / "checkpoints")
    engine.destroy()
    dist.destroy_process_group()


main()
