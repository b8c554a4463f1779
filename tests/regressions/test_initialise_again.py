"""Pain: a model can be handed over once. Here an engine gives it back as an ordinary one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from tests.support.models import Gpt, batches, share, zero
from tests.support.ranks import Ranks
from tests.support.training import distance

OPTIONS = {"lr": 1e-2}


def start(model: nn.Module, stage: int, **config: Any) -> shardwell.Engine:
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    return shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, **config)).engine


def train(engine: shardwell.Engine, seed: int) -> None:
    for batch in batches(2, 4, seed=seed):
        engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()


def again(stages: tuple[int, int]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Gpt(tied=True).double()
    for number, stage in enumerate(stages):
        engine = start(model, stage)
        train(engine, number)
        if number == 0:
            engine.backward(engine(share(batches(1, 4)[0], dist.get_rank(), dist.get_world_size())))  # given up
        engine.destroy()
        assert all(type(p) is nn.Parameter and p.dtype is torch.float64 for p in model.parameters())
        assert all(p.grad is None for p in model.parameters())
    model(batches(1, 4)[0]).backward()  # as anybody's model
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stages", [(0, 3), (3, 2), (2, 1)], ids=str)
def test_a_model_is_handed_over_again_after_destroy_at_another_stage(ranks: Ranks, stages: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Gpt(tied=True).double()
    for seed in range(2):
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        for batch in batches(2, 4, seed=seed):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for found in ranks.run(2, again, stages):
        difference, name = distance(found, expected)
        assert difference < 1e-10, f"{name} differs by {difference}"


def given_back(stage: int, precision: str) -> float:
    """How far parameters are from what they were before an engine that took no step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = start(model, stage, **{precision: {"enabled": True}})
    engine.destroy()
    after = model.state_dict()
    assert {name: value.dtype for name, value in after.items()} == {name: v.dtype for name, v in before.items()}
    return max(float((after[name] - value).abs().max()) for name, value in before.items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_comes_back_in_the_precision_that_it_was_given_in(ranks: Ranks, precision: str) -> None:
    for stage in (0, 2, 3):
        assert ranks.run(2, given_back, stage, precision) == [0.0, 0.0], f"stage {stage}"


def test_an_engine_that_was_destroyed_says_so() -> None:
    engine = shardwell.initialize(model=Gpt(), config=zero(2), device="cpu").engine
    engine.destroy()
    engine.destroy()
    with pytest.raises(shardwell.ShardwellError, match="this engine was destroyed"):
        engine(batches(1, 2)[0])


def kept_apart() -> bool:
    model = Gpt()
    engine = start(model, 3)
    engine.destroy(whole=False)
    with pytest.raises(shardwell.errors.ReleasedParameterError):
        model.head.weight.sum()
    return True


def test_nothing_is_gathered_where_that_is_not_wanted(ranks: Ranks) -> None:
    assert ranks.run(2, kept_apart) == [True, True]


def test_an_error_on_its_way_is_not_held_up_by_a_gather() -> None:
    engine = shardwell.initialize(
        model=Gpt(), config=zero(3, shardwell={"shard_at_world_one": True}), device="cpu"
    ).engine
    try:
        raise ValueError("a user's own")
    except ValueError:
        engine.destroy()
    with pytest.raises(shardwell.errors.ReleasedParameterError):
        engine.module.head.weight.sum()
