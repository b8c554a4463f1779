"""Pain: a second engine on the same model. Here `initialize` ends the engine that the model has."""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.engine.teardown import end_engines_of
from shardwell.sharding import released
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.training import distance

OPTIONS = {"lr": 1e-2}
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."
HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def start(model: nn.Module, stage: int, **config: Any) -> shardwell.Engine:
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    return shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, **config)).engine


def mine(batch: Tensor) -> Tensor:
    return share(batch, dist.get_rank(), dist.get_world_size())


def train(engine: shardwell.Engine, seed: int) -> None:
    for batch in batches(2, 4, seed=seed):
        engine.backward(engine(mine(batch)))
        engine.step()


@cache
def expected() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Gpt(blocks=2, tied=True).double()
    for seed in range(2):
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        for batch in batches(2, 4, seed=seed):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check(found: list[dict[str, Tensor]]) -> None:
    for one in found:
        difference, name = distance(one, expected())
        assert difference < 1e-10, f"{name} differs by {difference}"


class Failing(Gpt):
    """Raises what an allocator raises, where it is told to."""

    fails = False

    def forward(self, *args: Any) -> Any:
        loss = super().forward(*args)
        if self.fails:
            raise RuntimeError(OUT_OF_MEMORY)
        return loss


# ----------------------------------------------------------------------------------------------------- without failure


def another(stages: tuple[int, int], how: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Gpt(blocks=2, tied=True).double()
    if how == "evaluation":
        first = shardwell.initialize(model=model, config=zero(stages[0])).engine
        with torch.no_grad():
            first(mine(batches(1, 4)[0]))
        first = start(model, stages[0])
    else:
        first = start(model, stages[0])
    train(first, 0)
    first.backward(first(mine(batches(1, 4)[0])))  # given up
    if how == "forgotten":
        del first
        gc.collect()
    if how == "wiped":  # as Lightning does before it tests
        for module in model.modules():
            module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
            module._state_dict_hooks = OrderedDict()
    second = start(model, stages[1])
    train(second, 1)
    if how == "living":
        with pytest.raises(shardwell.ShardwellError, match="this engine was destroyed"):
            first(mine(batches(1, 4)[0]))
    return whole_parameters(model)


@pytest.mark.parametrize(
    ("stages", "how"),
    [
        ((0, 3), "living"),
        ((3, 3), "living"),
        ((3, 1), "forgotten"),
        ((2, 2), "wiped"),
        ((3, 2), "wiped"),
        ((3, 3), "evaluation"),
        ((1, 0), "evaluation"),
    ],
    ids=str,
)
def test_initialize_ends_the_engine_that_a_model_has(ranks: Ranks, stages: tuple[int, int], how: str) -> None:
    check(ranks.run(2, another, stages, how))


def between(tier: str | None) -> tuple[bool, float]:
    torch.manual_seed(0)
    model = Gpt()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = {"zero_optimization": {"offload_param": {"device": tier}}} if tier else {}
    start(model, 3, bf16={"enabled": True}, **config)
    end_engines_of(model)
    are_away = all(released.is_released(p) and p.dtype is torch.float32 for p in model.parameters())
    after = whole_parameters(model)
    return are_away, max(float((after[name] - value).abs().max()) for name, value in before.items())


@pytest.mark.parametrize("tier", [None, "cpu"])
def test_parameters_stay_sharded_between_two_engines_with_all_their_bits(ranks: Ranks, tier: str | None) -> None:
    assert ranks.run(2, between, tier) == [(True, 0.0), (True, 0.0)]


def kept(stage: int) -> dict[str, Tensor]:
    """What becomes of a model whose engine gave nothing back."""
    torch.manual_seed(0)
    model = Gpt(blocks=2, tied=True).double()
    first = start(model, stage)
    train(first, 0)
    first.destroy(whole=False)
    train(start(model, stage), 1)
    return whole_parameters(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_was_not_made_whole_goes_on_in_another_engine(ranks: Ranks, stage: int) -> None:
    check(ranks.run(2, kept, stage))


# ---------------------------------------------------------------------------------------------------------- hooks gone


def wiped_and_used(stage: int) -> tuple[dict[str, Tensor], list[str]]:
    torch.manual_seed(0)
    model = Gpt(blocks=2, tied=True).double()
    engine, words = start(model, stage), []
    listener = logging.Handler()
    listener.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwell").addHandler(listener)
    train(engine, 0)
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    train(engine, 0)
    logging.getLogger("shardwell").removeHandler(listener)
    return whole_parameters(model), [text for text in words if "removed the forward hooks" in text]


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_puts_hooks_back_that_other_code_removed_and_says_so(ranks: Ranks, stage: int) -> None:
    torch.manual_seed(0)
    model = Gpt(blocks=2, tied=True).double()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for batch in 2 * batches(2, 4, seed=0):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    for found, words in ranks.run(2, wiped_and_used, stage):
        assert len(words) == 1
        assert distance(found, {name: p.detach() for name, p in model.named_parameters()})[0] < 1e-10


# ------------------------------------------------------------------------------------------------------ after failures


def after_failure(stage: int, failing: tuple[int, ...], way: str, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = Failing(blocks=2, tied=True).double()
    first = start(model, stage, **config)
    train(first, 0)
    model.fails = dist.get_rank() in failing
    with pytest.raises(RuntimeError, match=r" out of memory\.") as caught:  # accelerate looks for these words
        first.backward(first(mine(batches(1, 4)[0])))
    assert len(caught.value.args) == 1
    model.fails = False
    if way == "destroy":
        first.destroy()
        assert all(type(p) is nn.Parameter for p in model.parameters())
    train(start(model, stage, **config), 1)
    return whole_parameters(model)


@pytest.mark.parametrize(
    ("stage", "failing", "way", "config"),
    [
        (0, (0, 1), "initialize", {}),
        (1, (0, 1), "destroy", {}),
        (2, (0, 1), "initialize", {}),
        (3, (0, 1), "initialize", {}),
        (3, (0, 1), "destroy", {}),
        (2, (0, 1), "initialize", HOST),
        (0, (0,), "initialize", {}),
        (2, (1,), "destroy", {}),
        (3, (1,), "initialize", {}),
    ],
    ids=str,
)
def test_a_model_goes_on_after_a_failure_that_all_ranks_raised(
    ranks: Ranks, stage: int, failing: tuple[int, ...], way: str, config: dict[str, Any]
) -> None:
    check(ranks.run(2, after_failure, stage, failing, way, config))


def alone(stage: int) -> str:
    torch.manual_seed(0)
    model = Failing(blocks=2, tied=True)
    first = start(model, stage)
    train(first, 0)
    model.fails = dist.get_rank() == 0
    if model.fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            first(mine(batches(1, 4)[0]))
    dist.barrier()
    with pytest.raises(shardwell.ShardwellError) as caught:
        start(model, stage)
    return str(caught.value)


def test_a_failure_that_only_some_ranks_had_is_not_taken_for_one_of_all(ranks: Ranks) -> None:
    for words in ranks.run(2, alone, 0):
        assert "rank 1 did not have the failure of the others (rank 0: RuntimeError in forward: CUDA out of" in words
        assert " out of memory." not in words  # or it would be taken for another failure of that kind


def in_a_step() -> str:
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    first = shardwell.initialize(model=model, optimizer=optimizer, config=zero(2)).engine
    train(first, 0)

    def fail(*args: Any) -> None:
        raise RuntimeError(OUT_OF_MEMORY)

    optimizer.register_step_post_hook(fail)
    first.backward(first(mine(batches(1, 4)[0])))
    with pytest.raises(RuntimeError, match="out of memory"):
        first.step()
    with pytest.raises(shardwell.ShardwellError) as caught:
        start(model, 2)
    return str(caught.value)


def test_after_a_failure_in_a_step_a_model_is_not_handed_on(ranks: Ranks) -> None:
    for words in ranks.run(2, in_a_step):
        assert "failed in a step: its parameters may be updated in part" in words
