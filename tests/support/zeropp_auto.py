"""ZeRO++ at `"auto"`: training, and what was chosen and said."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.engine import autotune
from shardwell.engine.autotune import COPIES, GRADIENTS, WEIGHTS
from shardwell.memory import StateKind
from shardwell.parallel import TrafficKind
from tests.support.models import Gpt, batches, share, zero

AUTO = {WEIGHTS: "auto", GRADIENTS: "auto", COPIES: "auto"}
ON = {WEIGHTS: True, GRADIENTS: True, COPIES: 2}


class Said(logging.Handler):
    """What is logged meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Said:
        logger = logging.getLogger("shardwell")
        self._level = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("shardwell")
        logger.removeHandler(self)
        logger.setLevel(self._level)


def trained(block: dict[str, Any], stage: int = 3, ranks_per_node: int = 2, **extra: Any) -> dict[str, Any]:
    """What was chosen and why, and what travelled before the steps and in one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks_per_node), LOCAL_RANK=str(rank % ranks_per_node))
    torch.manual_seed(0)
    model = Gpt(blocks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = torch.get_rng_state()
    config = zero(stage, zero_optimization=block, **extra)
    with Said() as said:
        engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    set_up, staging = engine.traffic(), engine.memory().total(StateKind.STAGING)
    for batch in batches(2, 8):
        loss = engine(share(batch, rank, size))
        engine.backward(loss)
        engine.step()
    effective = engine.config.zero_optimization
    return {
        "chosen": {key: getattr(effective, key) for key in AUTO},
        "origins": [engine.config.origins[f"zero_optimization.{key}"] for key in AUTO],
        "said": said.lines,
        "set_up": {kind: set_up.total(kind) for kind in TrafficKind},
        "staging": staging,
        "same_randomness": torch.equal(before, torch.get_rng_state()),
        "step": engine.traffic().received,
        "loss": float(loss),
    }


def trained_if(worth_it: float, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """With another opinion on what is worth it: infinity turns everything on, 0 turns everything off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotune, "WORTH_IT", worth_it)
        return trained(*args, **kwargs)
