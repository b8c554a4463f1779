"""Bad input and misuse: one clear error, before any work is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from tests.support.models import Gpt, batches, whole_parameters, zero
from tests.support.ranks import Ranks


def engine_for(stage: int, **config: Any) -> shardwell.Engine:
    torch.manual_seed(0)
    model = Gpt()
    config.setdefault("shardwell", {})["shard_at_world_one"] = True
    return shardwell.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config=zero(stage, **config),
        device="cpu",
    ).engine


def batch() -> torch.Tensor:
    return batches(1, 4)[0]


STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@STAGES
def test_nan_is_an_error_and_leaves_everything_as_it_was(stage: int) -> None:
    engine = engine_for(stage)
    engine.backward(engine(batch()))
    engine.step()
    before = whole_parameters(engine.module)
    engine.backward(engine(batch()) * float("nan"))
    with pytest.raises(shardwell.NonFiniteError, match="not applied"):
        engine.step()
    after = whole_parameters(engine.module)
    assert all(torch.equal(before[name], after[name]) for name in before)
    engine.backward(engine(batch()))
    engine.step()  # and training goes on


@STAGES
def test_nan_steps_can_be_skipped(stage: int) -> None:
    engine = engine_for(stage, shardwell={"nonfinite": "skip"})
    before = whole_parameters(engine.module)
    engine.backward(engine(batch()) * float("inf"))
    engine.step()
    after = whole_parameters(engine.module)
    assert engine.skipped_steps == 1
    assert engine.optimizer.overflow
    assert all(torch.equal(before[name], after[name]) for name in before)


@STAGES
def test_backward_twice_on_one_loss_is_an_error(stage: int) -> None:
    engine = engine_for(stage)
    loss = engine(batch())
    engine.backward(loss)
    with pytest.raises(shardwell.BackwardError, match="twice"):
        engine.backward(loss)
    engine.step()


@STAGES
def test_backward_twice_with_a_retained_graph_adds_up(stage: int) -> None:
    once, twice = engine_for(stage), engine_for(stage)
    once.backward(once(batch()))
    once.step()
    loss = twice(batch())
    twice.backward(loss, retain_graph=True)
    twice.backward(loss)
    twice.step()
    assert twice.get_global_grad_norm() == pytest.approx(2 * once.get_global_grad_norm(), rel=1e-5)


def test_backward_without_a_graph_is_an_error() -> None:
    engine = engine_for(3)
    with torch.no_grad():
        loss = engine(batch())
    with pytest.raises(shardwell.BackwardError, match="no_grad"):
        engine.backward(loss)


def replace_parameter(model: Gpt) -> None:
    model.head.weight = nn.Parameter(torch.zeros(29, 16))


def add_module(model: Gpt) -> None:
    model.blocks.append(nn.Linear(2, 2))


@pytest.mark.parametrize("change", [replace_parameter, add_module])
@STAGES
def test_a_model_that_changes_before_its_gradients_are_used_is_an_error(stage: int, change: Any) -> None:
    engine = engine_for(stage)
    engine.backward(engine(batch()))
    change(engine.module)
    with pytest.raises(shardwell.ModelChangedError, match=r"gradients wait for a step.*zero_grad"):
        engine(batch())


def test_a_model_belongs_to_its_last_engine_and_the_one_before_has_ended() -> None:
    engine = engine_for(3)
    after = shardwell.initialize(model=engine.module, config=zero(3), device="cpu").engine
    after(batch())
    with pytest.raises(shardwell.ShardwellError, match=r"destroyed|ended|handed"):
        engine(batch())


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_optimizers_that_need_whole_tensors_are_refused(name: str) -> None:
    model = Gpt()
    with pytest.raises(shardwell.ShardwellError, match="not elementwise"):
        shardwell.initialize(model=model, optimizer=getattr(torch.optim, name), config=zero(1), device="cpu")


def test_an_unknown_optimizer_name_lists_the_known_ones() -> None:
    with pytest.raises(shardwell.ConfigError, match="AdamW"):
        shardwell.initialize(model=Gpt(), config=zero(1, optimizer={"type": "Adan"}), device="cpu")


def test_a_unit_class_that_the_model_does_not_have_is_an_error() -> None:
    config = zero(3)
    config["zero_optimization"]["leaf_module"] = {"classes": ["Blok"]}
    with pytest.raises(shardwell.ConfigError, match="Blok"):
        shardwell.initialize(model=Gpt(), config=config, device="cpu")


def test_an_optimizer_that_took_steps_is_refused() -> None:
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch()).backward()
    optimizer.step()
    with pytest.raises(shardwell.ShardwellError, match="taken steps"):
        shardwell.initialize(model=model, optimizer=optimizer, config=zero(1), device="cpu")


def nan_on_one_rank(stage: int) -> str:
    import torch.distributed as dist

    torch.manual_seed(0)
    model = Gpt()
    engine, *_ = shardwell.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=zero(stage), device="cpu"
    )
    engine.backward(engine(batch()) * (float("nan") if dist.get_rank() == 1 else 1.0))
    try:
        engine.step()
    except shardwell.NonFiniteError:
        return "refused"
    return "stepped"


@STAGES
def test_nan_on_one_rank_is_refused_on_all(ranks: Ranks, stage: int) -> None:
    assert ranks.run(2, nan_on_one_rank, stage) == ["refused", "refused"]
