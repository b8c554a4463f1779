"""Pain: the loss of one stage differs from that of another, or from DistributedDataParallel."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwell
from tests.support.models import Gpt, batches, share, zero
from tests.support.ranks import Ranks

STEPS, ROWS, CLIP = 10, 12, 0.5


def make(dtype: torch.dtype) -> tuple[Gpt, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Gpt().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def losses_of_ddp(dtype: torch.dtype, accumulation: int) -> list[float]:
    model, optimizer = make(dtype)
    wrapped = DistributedDataParallel(model)
    losses = []
    for batch in batches(STEPS, ROWS):
        optimizer.zero_grad()
        for micro in range(accumulation):
            last = micro + 1 == accumulation
            with contextlib.nullcontext() if last else wrapped.no_sync():
                loss = wrapped(share(batch, dist.get_rank(), dist.get_world_size(), micro, accumulation))
                (loss / accumulation).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return losses


def losses_of_stage(dtype: torch.dtype, accumulation: int, stage: int) -> list[float]:
    model, optimizer = make(dtype)
    config = zero(stage, gradient_clipping=CLIP, gradient_accumulation_steps=accumulation)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for batch in batches(STEPS, ROWS):
        for micro in range(accumulation):
            loss = engine(share(batch, dist.get_rank(), dist.get_world_size(), micro, accumulation))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def losses_of_all(dtype: torch.dtype, accumulation: int) -> tuple[list[float], list[list[float]]]:
    return losses_of_ddp(dtype, accumulation), [losses_of_stage(dtype, accumulation, stage) for stage in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_stage_has_the_losses_of_ddp(ranks: Ranks, accumulation: int) -> None:
    """A change of stage changes the loss curve; here it stays that of DDP, to 1e-12 in fp64."""
    for ddp, stages in ranks.run(2, losses_of_all, torch.float64, accumulation):
        assert ddp[-1] < ddp[0]
        for losses in stages:
            assert losses == pytest.approx(ddp, rel=1e-12)


@pytest.mark.slow
def test_stages_1_2_and_3_have_the_same_losses_to_the_last_bit(ranks: Ranks) -> None:
    """Sharding more changes the loss in the last digits, which grow; here no bit differs in fp32."""
    for ddp, (zeroth, first, second, third) in ranks.run(2, losses_of_all, torch.float32, 1):
        assert first == second == third
        assert first == pytest.approx(zeroth, rel=1e-5)
        assert first == pytest.approx(ddp, rel=1e-5)
