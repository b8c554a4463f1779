"""Pain: overlapping communication races with compute, and gradients become NaN or wrong now and then."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwell
from tests.models import Gpt, batches, share, whole_parameters, zero
from tests.ranks import Ranks

STEPS, LONGEST = 10, 0.004  # seconds


def hold_up(model: Gpt) -> None:
    """Sleep at random in the middle of units, forwards and backwards; every rank at other places."""
    dice = random.Random(dist.get_rank())

    def sleep(*_: Any) -> None:
        if dice.random() < 0.3:
            time.sleep(dice.random() * LONGEST)

    def after(module: Any, args: Any, output: Tensor) -> None:
        sleep()
        if output.requires_grad:
            output.register_hook(sleep)

    for module in model.modules():
        if next(module.children(), None) is None:
            module.register_forward_pre_hook(sleep)
            module.register_forward_hook(after)


def train(stage: int, disturbed: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Gpt()
    if disturbed:
        hold_up(model)
    config = zero(stage, gradient_accumulation_steps=2, gradient_clipping=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    norms = []
    for batch in batches(STEPS, 12):
        for micro in range(2):
            engine.backward(engine(share(batch, rank, num_ranks, micro, 2)))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return {"norms": norms, "parameters": whole_parameters(model)}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_stumble_at_random_get_the_same_bits(ranks: Ranks, stage: int) -> None:
    """Overlap lets a late rank read or send buffers that are in use; here a sleep anywhere changes nothing."""
    calm, stumbling = (ranks.run(3, train, stage, disturbed) for disturbed in (False, True))
    for before, after in zip(calm, stumbling, strict=True):
        assert before["norms"] == after["norms"]
        for name, values in before["parameters"].items():
            assert (values == after["parameters"][name]).all(), name
