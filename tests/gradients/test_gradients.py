"""What `p.grad` is between a backward and its step, and who is told that he looks in the wrong place."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import shardwell
from tests.support.gradient_loops import Net, adamw, data, net
from tests.support.internals import reducer_of
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def engine_of(stage: int, given: Any = adamw, **extra: Any) -> tuple[shardwell.Engine, Net, Any]:
    model = net()
    mine = None if given is None else given(model.parameters())
    engine, *_ = shardwell.initialize(model=model, optimizer=mine, config=zero(stage, **extra))
    return engine, model, mine


def words_of(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(shardwell.ShardwellError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ the wrong place


def words_for_strangers(stage: int) -> dict[str, str]:
    engine, model, _ = engine_of(stage, given=None, **ADAMW)
    stranger = torch.optim.SGD(model.parameters(), lr=0.1)
    (batch,) = data(1)
    engine(batch).backward()
    words = {
        "step": words_of(stranger.step),
        "clip": words_of(clip_grad_norm_, engine.optimizer.param_groups[0]["params"], 1.0),
    }
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    words["scaler"] = words_of(scaler.unscale_, engine.optimizer)
    words["scaler of model"] = words_of(scaler.unscale_, stranger)
    before = whole_parameters(model)
    engine.step()
    after = whole_parameters(model)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    return words


@STAGES
def test_an_optimizer_beside_the_engines_own_is_refused(ranks: Ranks, stage: int) -> None:
    for words in ranks.run(2, words_for_strangers, stage):
        assert "this SGD was made over parameters" in words["step"]
        assert "engine.step()" in words["step"]
        assert "model.parameters()" in words["clip"]
        assert '"fp16": {"enabled": true}' in words["scaler"]
        assert '"fp16": {"enabled": true}' in words["scaler of model"]


def words_inside_backward(stage: int) -> str:
    engine, model, _ = engine_of(stage)
    (batch,) = data(1)
    said: list[str] = []

    def look(parameter: Tensor) -> None:
        if parameter.grad is not None:
            said.append(words_of(parameter.grad.sum))

    model.last.weight.register_post_accumulate_grad_hook(look)
    engine(batch).backward()
    engine.step()
    return said[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_reading_a_gradient_inside_backward_says_when_it_is_there(ranks: Ranks, stage: int) -> None:
    for words in ranks.run(2, words_inside_backward, stage):
        assert "while backward still runs" in words


# --------------------------------------------------------------------------------------------- before the engine


def after_a_trial(stage: int, drops: str) -> dict[str, Tensor]:
    """A backward before `initialize`, then two steps."""
    model = net()
    optimizer = adamw(model.parameters())
    first, second, third = data(3)
    model(first).backward()
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage))
    if drops:
        {"engine": engine, "module": model, "optimizer": optimizer}[drops].zero_grad()
    for batch in (second, third):
        engine(batch).backward()
        engine.step()
    return whole_parameters(model)


def plain_trial(drops: str) -> dict[str, Tensor]:
    model = net()
    optimizer = adamw(model.parameters())
    first, second, third = data(3)
    model(first).backward()
    if drops:
        model.zero_grad()
    for batch in (second, third):
        model(batch).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@STAGES
@pytest.mark.parametrize("drops", ["", "engine", "module", "optimizer"])
def test_gradients_from_before_the_engine_count_until_they_are_dropped(ranks: Ranks, stage: int, drops: str) -> None:
    expected = ranks.run(2, plain_trial, drops)[0]
    for found in ranks.run(2, after_a_trial, stage, drops):
        for name, value in expected.items():
            assert abs(found[name] - value).max() < 1e-5, name


# ------------------------------------------------------------------------------------------------------ readings


def kinds_of_grad(stage: int) -> dict[str, Any]:
    engine, model, _ = engine_of(stage)
    weight = model.blocks[0][0].weight
    first, second = data(2)
    seen = {"before": weight.grad is None}
    engine(first).backward()
    grad = weight.grad
    seen["metadata"] = (grad.shape, grad.dtype, grad.device.type, grad.numel(), grad.is_sparse) == (
        weight.shape, weight.dtype, "cpu", weight.numel(), False,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = [grad.sum(), grad.tolist(), str(grad), grad.numpy(), grad.T]
    seen["warnings"] = sum("full gradient was read" in str(one.message) for one in caught)
    seen["values"] = len(values)
    before = [p.grad is not None for p in model.parameters()]
    engine(second)  # an evaluation changes nothing
    seen["stays"] = before == [p.grad is not None for p in model.parameters()]
    engine.step()
    seen["after"] = weight.grad is None
    return seen


@STAGES
def test_grad_is_there_from_backward_to_step(ranks: Ranks, stage: int) -> None:
    for seen in ranks.run(2, kinds_of_grad, stage):
        assert seen.pop("warnings") == 1
        assert seen == {"before": True, "metadata": True, "values": 5, "stays": True, "after": True}


def after_a_step_of_ones_own(stage: int) -> dict[str, Any]:
    engine, model, mine = engine_of(stage)
    first, second = data(2)
    engine(first).backward()
    mine.step()
    weight = model.last.weight
    seen: dict[str, Any] = {"hangs": weight.grad is not None, "words": words_of(weight.grad.sum)}
    seen["again"] = words_of(reducer_of(engine).views.take_edits, at_step=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine(second).backward()
        mine.step()
    seen["warnings"] = [str(one.message) for one in caught if "zero_grad()" in str(one.message)]
    mine.zero_grad()
    seen["dropped"] = weight.grad is None
    return seen


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_that_a_step_of_ones_own_used_up_are_not_added_to_in_silence(ranks: Ranks, stage: int) -> None:
    for seen in ranks.run(2, after_a_step_of_ones_own, stage):
        assert seen["hangs"]
        assert seen["dropped"]
        assert "between backward and step" in seen["words"]
        assert "stepped again without a backward" in seen["again"]
        assert len(seen["warnings"]) == 1


def is_freed(stage: int) -> bool:
    engine, model, mine = engine_of(stage)
    for batch in data(2):
        engine(batch).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        model.first.weight.grad.sum()
    gone = weakref.ref(engine)
    del engine, mine
    gc.collect()
    return gone() is None


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_do_not_keep_an_engine_alive(ranks: Ranks, stage: int) -> None:
    assert all(ranks.run(2, is_freed, stage))


class Choice(nn.Module):
    """Ranks use different experts of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(7, 7) for _ in range(2)])
        self.head = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts[dist.get_rank() % 2](x)).square().mean()


def clipped_experts(stage: int) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Choice()
    config = zero(stage, zero_optimization={"leaf_module": {"names": ["experts"]}})
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    (batch,) = data(1)
    engine(batch).backward()
    norm = float(clip_grad_norm_(model.parameters(), 0.01))
    engine.step()
    return norm, whole_parameters(model)


@pytest.mark.parametrize("stage", [2, 3])
def test_all_ranks_clip_alike_whatever_parameters_they_used(ranks: Ranks, stage: int) -> None:
    (first, one), (second, other) = ranks.run(2, clipped_experts, stage)
    assert first == pytest.approx(second, rel=1e-6)
    assert all((one[name] == other[name]).all() for name in one)


def scaled(stage: int) -> tuple[float, float]:
    """With the loss scale of fp16, `p.grad` is what it would be without."""
    model = net()
    config = zero(stage, fp16={"enabled": True, "initial_scale_power": 10})
    engine, *_ = shardwell.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    (batch,) = data(1)
    engine.backward(engine(batch).float())
    found = float(clip_grad_norm_(model.parameters(), 1e9)), float(model.last.weight.grad.float().norm())
    plain = net()
    plain(batch).backward()
    expected = [p.grad.clone() for p in plain.parameters()]
    for grad in expected:
        dist.all_reduce(grad)
    total = float(torch.stack([(grad / dist.get_world_size()).norm() for grad in expected]).norm())
    return found[0] / total, float(found[1]) / float((expected[-2] / dist.get_world_size()).norm())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_are_shown_without_the_loss_scale(ranks: Ranks, stage: int) -> None:
    for ratios in ranks.run(2, scaled, stage):
        assert ratios == pytest.approx((1.0, 1.0), rel=0.02)
