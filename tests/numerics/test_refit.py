"""Where a changed model meets its engine: memory is given back, gradients do not wait, and newcomers are known."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import shardwell
from shardwell.memory import StateKind
from shardwell.zero import GatheredParameters
from tests.support.changing_models import (
    OPTIONS,
    STAGES,
    VOCAB,
    WIDTH,
    Block,
    Net,
    at_all_stages,
    build,
    fresh,
    more_rows,
    tokens,
    train,
)
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks

# ------------------------------------------------------------------------------------------------- what refit is for


def give_back(stage: int, **config: Any) -> dict[str, Any]:
    model = build()
    engine, *_ = shardwell.initialize(
        model=model.float(), optimizer=AdamW(model.parameters(), **OPTIONS), config=zero(stage, **config)
    )
    train(engine, range(2))
    before = books(engine)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    engine.refit()
    at_once = books(engine)
    train(engine, range(2, 4))
    trained = books(engine)
    model.requires_grad_(True)
    train(engine, range(4, 6))
    return {"before": before, "at once": at_once, "trained": trained, "thawed": books(engine)}


def books(engine: shardwell.Engine) -> dict[str, int]:
    """Optimizer bytes by unit."""
    found: dict[str, int] = {}
    for (state, unit, _), size in engine.memory().now.items():
        if state is StateKind.OPTIMIZER:
            found[unit] = found.get(unit, 0) + size
    return found


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_refit_after_freezing_gives_memory_back(ranks: Ranks, stage: int, precision: str) -> None:
    for answer in ranks.run(2, give_back, stage, bf16={"enabled": precision == "bf16"}):
        before = answer["before"]
        for after in (answer["at once"], answer["trained"]):
            assert after.get("blocks.0", 0) == 0
            assert 0 < after["blocks.1"] < 0.75 * before["blocks.1"]
            assert after["blocks.2"] == before["blocks.2"]
        assert answer["thawed"]["blocks.0"] == pytest.approx(before["blocks.0"], abs=64)  # padding, step counts


def wait_and_change(stage: int, change: str) -> str:
    model = build()
    model.blocks[2].up.requires_grad_(False)
    config = zero(stage, gradient_accumulation_steps=2)
    engine, *_ = shardwell.initialize(model=model, optimizer=AdamW(model.parameters()), config=config)
    train(engine, range(1))
    if change == "resize":
        with GatheredParameters(model.parameters(), modifier_rank=0):
            model.embed.weight.data = more_rows(model.embed.weight)
    elif change == "replace":
        model.head.weight = nn.Parameter(torch.zeros(VOCAB, WIDTH).double())
    elif change == "remove":
        del model.blocks[0]
    elif change == "thaw":
        model.blocks[2].up.requires_grad_(True)
    try:
        train(engine, range(1, 2))
    except shardwell.ShardwellError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("change", ["resize", "replace", "remove", "thaw"])
def test_a_change_while_gradients_wait_is_an_error(ranks: Ranks, change: str) -> None:
    for by_stage in ranks.run(2, at_all_stages, wait_and_change, change):
        for stage, said in zip(STAGES, by_stage, strict=True):
            assert said.startswith(("ModelChangedError", "PeerError")), f"stage {stage}: {said}"
            assert "gradients wait for a step" in said


def nothing_waits(stage: int) -> int:
    """After zero_grad a change is welcome."""
    model = build()
    engine, *_ = shardwell.initialize(model=model, optimizer=AdamW(model.parameters()), config=zero(stage))
    engine.backward(engine(tokens(0, 1)[0]))
    model.blocks[1] = fresh(Block)
    engine.zero_grad()
    train(engine, range(2))
    return engine.global_steps


def test_after_zero_grad_a_change_is_welcome(ranks: Ranks) -> None:
    assert ranks.run(2, at_all_stages, nothing_waits)[0] == [2, 2, 2, 2]


# -------------------------------------------------------------------------------------------------------- newcomers


def labels_of_newcomers(stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters of removed blocks are gone; whoever gets their memory must not get their place in the optimizer."""
    model = build()
    engine, *_ = shardwell.initialize(model=model, optimizer=AdamW(model.parameters(), **OPTIONS), config=zero(stage))
    train(engine, range(1))
    del model.blocks[2]
    train(engine, range(1))
    gc.collect()
    for number in range(30):
        model.add_module(f"extra{number}", fresh(lambda: nn.Linear(WIDTH, WIDTH), number))
    forward = type(model).forward

    def with_extras(self: Net, batch: Tensor) -> Tensor:
        rows = self.embed(batch)
        return forward(self, batch) + sum(getattr(self, f"extra{n}")(rows).square().mean() for n in range(30))

    model.forward = with_extras.__get__(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "extra" in name}
    train(engine, range(2))
    after = {name: value for name, value in whole_parameters(model).items() if "extra" in name}
    return before, after


@pytest.mark.slow
def test_newcomers_train_only_if_the_optimizer_was_given_them(ranks: Ranks) -> None:
    for by_stage in ranks.run(2, at_all_stages, labels_of_newcomers):
        for stage, (before, after) in zip(STAGES, by_stage, strict=True):
            moved = [name for name in before if (before[name] != after[name]).any()]
            assert len(before) == 60
            assert not moved, f"stage {stage}: {moved}"


def away_and_back(stage: int) -> tuple[Any, Any, Any]:
    """A block's weights before it leaves the model, after a step without it, and after a step with it again."""
    model = build()
    engine, *_ = shardwell.initialize(model=model, optimizer=AdamW(model.parameters(), **OPTIONS), config=zero(stage))
    train(engine, range(1))
    before = whole_parameters(model)["blocks.1.up.weight"]
    block = model.blocks.pop(1)
    train(engine, range(1))
    away = block.up.weight.detach().clone()
    model.blocks.insert(1, block)
    train(engine, range(1))
    return before, away, whole_parameters(model)["blocks.1.up.weight"]


@pytest.mark.slow
def test_a_block_that_comes_back_trains_again(ranks: Ranks) -> None:
    for before, away, after in ranks.run(2, at_all_stages, away_and_back)[0]:
        assert (before == away).all()
        assert (away != after).any()
