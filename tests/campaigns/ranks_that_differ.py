"""Ranks that differ in one thing: the difference is named on every rank, and none trains on; honest ones train.

    python -m tests.campaigns.ranks_that_differ --count 200 --seed 1 --minutes 20 --json results.json

Ranks are forked from this process once torch is imported. Each case is drawn from its seed: which thing, who has it,
how many ranks, which stage.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import shardwell
from shardwell.engine import consistency
from tests.campaigns.result import Result, command_line
from tests.support.patience import soon

LIMIT = 60.0  # seconds for one case

# What one rank has, and what all ranks must say; an empty word: it is honest, and all train.
Case = tuple[str, dict[str, Any], str]


def _config(word: str, **config: Any) -> Case:
    return f"configuration {word}", {"config": config}, word


CASES: list[Callable[[random.Random], Case]] = [
    lambda rng: _config("gradient_clipping", gradient_clipping=rng.uniform(0.1, 5)),
    lambda rng: _config("gradient_accumulation_steps", gradient_accumulation_steps=rng.randint(2, 9)),
    lambda rng: _config("train_micro_batch_size_per_gpu", train_micro_batch_size_per_gpu=rng.randint(2, 9)),
    lambda _: _config("prescale_gradients", prescale_gradients=True),
    lambda rng: _config("gradient_predivide_factor", gradient_predivide_factor=rng.uniform(2, 5)),
    lambda rng: _config("communication_data_type", communication_data_type=rng.choice(["fp16", "bf16"])),
    lambda _: _config("grad_accum_dtype", data_types={"grad_accum_dtype": "bf16"}),
    lambda _: _config("bf16.enabled", bf16={"enabled": True}),
    lambda _: _config("fp16.enabled", fp16={"enabled": True}),
    lambda _: _config("torch_autocast.enabled", torch_autocast={"enabled": True}),
    lambda rng: _config("shardwell.nonfinite", shardwell={"nonfinite": rng.choice(["error", "skip"])}),
    lambda _: _config("shardwell.find_unused_parameters", shardwell={"find_unused_parameters": True}),
    lambda _: _config("offload_optimizer.device", zero_optimization={"offload_optimizer": {"device": "cpu"}}),
    lambda _: _config("leaf_module.names", zero_optimization={"leaf_module": {"names": ["up"]}}),
    lambda rng: ("stage", {"stage": True}, "zero_optimization.stage"),
    lambda rng: ("optimizer", {"kind": rng.choice(["SGD", "RMSprop", "Adagrad"])}, "optimizer's class"),
    lambda rng: ("lr", {"options": {"lr": rng.uniform(0.2, 0.9)}}, "optimizer's lr"),
    lambda rng: ("weight decay", {"options": {"weight_decay": rng.uniform(0.2, 0.9)}}, "optimizer's weight_decay"),
    lambda rng: ("betas", {"options": {"betas": (0.8, rng.uniform(0.8, 0.9))}}, "optimizer's betas"),
    lambda _: ("amsgrad", {"options": {"amsgrad": True}}, "optimizer's amsgrad"),
    lambda rng: ("width", {"width": rng.randint(9, 30)}, "parameter 'up.weight'"),
    lambda rng: ("dtype", {"dtype": rng.choice([torch.float64, torch.bfloat16])}, "parameter 'up.weight'"),
    lambda _: ("frozen", {"frozen": True}, "parameter 'up.bias'"),
    lambda _: ("one more layer", {"extra": True}, "parameter 'extra.weight'"),
    lambda rng: ("buffer", {"scales": rng.randint(2, 9)}, "buffer scale"),
    lambda _: ("version", {"version": "0.0.1"}, "version of shardwell"),
    lambda rng: ("lr later", {"later": {"lr": rng.uniform(0.2, 0.9)}}, "optimizer's lr"),
    lambda rng: ("weight decay later", {"later": {"weight_decay": rng.uniform(0.2, 0.9)}}, "optimizer's weight_decay"),
    lambda _: ("broken", {"config": {"zero_optimization": {"stage": 9}}}, "zero_optimization.stage"),
    lambda _: ("prints", {"config": {"steps_per_print": 1}}, ""),
    lambda _: ("memory", {"config": {"shardwell": {"memory": {"host": 1 << 40}}}}, ""),
    lambda _: ("drive", {"config": {"zero_optimization": {"offload_param": {"nvme_path": "/mnt/other"}}}}, ""),
    lambda _: ("idle key", {"config": {"wall_clock_breakdown": True}}, ""),
    lambda _: ("other data", {"data": 3.0}, ""),
    lambda _: ("nothing", {}, ""),
]


class Small(nn.Module):
    """Two layers and a buffer."""

    def __init__(self, mine: dict[str, Any]) -> None:
        super().__init__()
        width, dtype = mine.get("width", 8), mine.get("dtype", torch.float32)
        self.up, self.down = nn.Linear(4, width, dtype=dtype), nn.Linear(width, 1, dtype=dtype)
        if mine.get("extra"):
            self.extra = nn.Linear(1, 1)
        if mine.get("frozen"):
            self.up.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(mine.get("scales", 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x)) * self.scale.to(x.dtype)).float().square().mean()


def rank_of(rank: int, size: int, port: int, stage: int, mine: dict[str, Any]) -> dict[str, Any]:
    """One rank's life: initialize, and three steps."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size), SHARDWELL_DEVICE="cpu",
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stage = (stage + 1) % 3 if mine.get("stage") else stage
    asked = mine.get("config", {})
    zero = {"stage": stage, **asked.get("zero_optimization", {})}
    model = Small(mine)
    options = {"lr": 0.1} | mine.get("options", {})
    optimizer = getattr(torch.optim, mine.get("kind", "AdamW"))(model.parameters(), **options)
    taken = 0
    try:
        with mock.patch.object(consistency, "__version__", mine.get("version", consistency.__version__)):
            engine, *_ = shardwell.initialize(
                model=model, optimizer=optimizer, config={**asked, "zero_optimization": zero}
            )
        for step in range(3):
            if step == 1 and engine.optimizer is not None:
                engine.optimizer.param_groups[0].update(mine.get("later", {}))
            engine.backward(engine(torch.full((2, 4), mine.get("data", 1.0), dtype=model.up.weight.dtype)))
            engine.step()
            taken += 1
    except shardwell.ShardwellError as error:
        return {"kind": type(error).__name__, "text": str(error), "taken": taken}
    except Exception as error:
        return {"kind": f"raw {type(error).__name__}", "text": str(error), "taken": taken}
    return {"kind": "", "text": "", "taken": taken}


def play(rng: random.Random) -> dict[str, Any]:
    """One case, judged."""
    name, mine, word = rng.choice(CASES)(rng)
    size, stage = rng.choice([2, 2, 3]), rng.randrange(3)
    odd = rng.randrange(size)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                answer = rank_of(rank, size, port, stage, mine if rank == odd else {})
                Path(folder, str(rank)).write_text(json.dumps(answer))
                os._exit(0)
            children.append(child)
        is_over = _await(children)
        files = [Path(folder, str(rank)) for rank in range(size)]
        answers = [json.loads(file.read_text()) if file.exists() else None for file in files]
    case = {"name": name, "ranks": size, "odd": odd, "stage": stage}
    # It ended at its error, and the store with it, before the others could read more.
    is_lost = (f"rank {odd} is gone", "gone: the process that holds it (rank 0's, or the launcher's) has ended")
    words = (word, *is_lost) if name == "broken" and odd == 0 else (word,)
    return {**case, "outcome": _judged(answers, words, name, is_over=is_over), "answers": answers}


def _await(children: list[int]) -> bool:
    """Until all have ended; those that do not within the limit are ended."""
    end = time.monotonic() + soon(LIMIT)
    left = set(children)
    while left and time.monotonic() < end:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.02)
    for child in left:
        os.kill(child, 9)
        os.waitpid(child, 0)
    return not left


def _judged(answers: list[Any], words: tuple[str, ...], name: str, *, is_over: bool) -> str:
    if not is_over:
        return "hang"
    if any(answer is None for answer in answers):
        return "crash"
    if any(answer["kind"].startswith("raw") for answer in answers):
        return "raw error"
    if not words[0]:
        return "trains" if all(answer["taken"] == 3 for answer in answers) else "honest, but refused"
    if any(answer["taken"] > (1 if name.endswith("later") else 0) for answer in answers):
        return "trained on in silence"
    is_user_unit = all(any(word in answer["text"] for word in words) for answer in answers)
    return "named" if is_user_unit else "refused without the name"


def campaign(count: int, seed: int, seconds: float) -> Result:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # torch imports more when the first optimizer is made
    result, begin = Result("ranks_that_differ"), time.monotonic()
    for number in range(count):
        if time.monotonic() - begin > seconds:
            break
        found = play(random.Random(f"{seed} {number}"))
        is_good = found["outcome"] in ("named", "trains")
        result.count(found["outcome"], "" if is_good else f"seed {seed}, number {number}: {found}")
    result.seconds = round(time.monotonic() - begin, 1)
    return result


if __name__ == "__main__":
    sys.exit(command_line(campaign, "tests.campaigns.ranks_that_differ", __doc__))
