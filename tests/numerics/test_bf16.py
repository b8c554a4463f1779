"""bf16 with fp32 masters follows a plain mixed-precision loop that uses the same rounding, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shardwell
from shardwell.kernels.rounding import to_bf16
from tests.support.models import Gpt, batches, zero
from tests.support.ranks import Ranks
from tests.support.training import ROWS, Case, all_sharded, distance

STEPS = 3


def plain_mixed_precision(num_ranks: int, accumulation: int) -> dict[str, Tensor]:
    """bf16 model, fp32 masters; bf16 gradients are averaged in fp32 (and, without accumulation, rounded)."""
    torch.manual_seed(0)
    masters = {name: torch.nn.Parameter(p.detach().clone()) for name, p in Gpt(blocks=2).named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, weight_decay=0.1)
    model = Gpt(blocks=2).bfloat16()
    for batch in batches(STEPS, ROWS):
        _load(model, masters)
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        for micro in batch.chunk(accumulation):
            for rows in micro.chunk(num_ranks):
                model.zero_grad()
                model(rows).backward()
                for name, parameter in model.named_parameters():
                    sums[name] += parameter.grad.float()
        for name, master in masters.items():
            mean = sums[name] / (num_ranks * accumulation)
            master.grad = mean if accumulation > 1 else mean.bfloat16().float()
        optimizer.step()
    _load(model, masters)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _load(model: torch.nn.Module, masters: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        to_bf16(masters[name].detach().view(-1), parameter.data.view(-1))


CASE = Case(dtype=torch.float32, steps=STEPS, config={"bf16": {"enabled": True}})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_equals_the_plain_loop_bit_for_bit(ranks: Ranks, stage: int) -> None:
    expected = plain_mixed_precision(2, 1)
    found = ranks.run(2, all_sharded, [CASE], stage)[0][0]
    for name, values in expected.items():
        assert (found[name] == values.float().numpy()).all(), name


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (1, 3), (3, 0), (3, 1), (3, 2), (3, 3)])
def test_bf16_accumulates_in_fp32(ranks: Ranks, stage: int, num_ranks: int) -> None:
    case = Case(dtype=torch.float32, steps=STEPS, accumulation=4, config=CASE.config)
    difference, name = distance(
        ranks.run(num_ranks, all_sharded, [case], stage)[0][0], plain_mixed_precision(num_ranks, 4)
    )
    # summed in another order in fp32, then rounded to bf16: a few elements may land one bf16 step apart
    assert difference < 2e-3, f"{name} differs by {difference}"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_masters_that_exist_only_in_a_step_are_refused_between_steps(stage: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    config = zero(stage, bf16={"enabled": True}, train_micro_batch_size_per_gpu=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, sharded, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).float().sum())
        engine.step()
    [master, *_] = sharded.param_groups[0]["params"]
    assert master.numel() > 0
    assert master.dtype is torch.float32
    assert str(master).startswith("ClosedMaster(")
    with pytest.raises(shardwell.ShardwellError, match="safe_get_full_fp32_param"):
        master.sum()
    with pytest.raises(shardwell.ShardwellError, match="exist only while a step runs"):
        master.detach()
