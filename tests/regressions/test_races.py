"""Pain: ranks and lanes race, and gradients become NaN, weights mix, or all hangs, now and then."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.ranks import Ranks

STEPS, LONGEST = 5, 0.004  # seconds


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
    model = Gpt(blocks=2)
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


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_stumble_at_random_get_the_same_bits(ranks: Ranks, stage: int) -> None:
    """Overlap lets a late rank read or send buffers that are in use; here a sleep anywhere changes nothing."""
    calm, stumbling = (ranks.run(3, train, stage, disturbed) for disturbed in (False, True))
    for before, after in zip(calm, stumbling, strict=True):
        assert before["norms"] == after["norms"]
        for name, values in before["parameters"].items():
            assert (values == after["parameters"][name]).all(), name


class Tangled(nn.Module):
    """A view of its first weight is in a cycle: it is gone when garbage is collected."""

    def __init__(self, collects: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(64, 64, bias=False)
        note: list[Any] = [self.a.weight.data[0]]
        note.append(note)
        del note
        if collects:
            gc.collect()
        self.b = nn.Linear(64, 64, bias=False)
        nn.init.constant_(self.b.weight, 5.0)
        self.c = nn.Linear(64, 64, bias=False)


def born_beside_garbage() -> dict[str, Tensor]:
    """Rank 0 collects garbage at a moment when rank 1 does not; then somebody comes back to all weights."""
    gc.disable()
    try:
        with shardwell.zero.Init(config_dict_or_path=zero(3)):
            model = Tangled(collects=dist.get_rank() == 0)
            for parameter in model.parameters():
                parameter.detach().mul_(2.0)
    finally:
        gc.enable()
    return whole_parameters(model)


def test_when_garbage_is_collected_is_no_matter_of_all_ranks(ranks: Ranks) -> None:
    with torch.random.fork_rng():
        plain = {name: 2 * value for name, value in Tangled(collects=True).state_dict().items()}
    for found in ranks.run(2, born_beside_garbage):
        assert found.keys() == plain.keys()
        for name, value in plain.items():
            assert (found[name] == value.numpy()).all(), name
