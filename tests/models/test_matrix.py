"""Models of transformers train sharded as they do plainly, with no change to their code."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell.config import load
from shardwell.sharding.released import ReleasedParameter
from tests.support import zoo
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.zoo import Run

pytestmark = pytest.mark.slow

DEFAULT = load({}).zero_optimization.stage3_param_persistence_threshold


def threshold(size: int) -> dict[str, Any]:
    return {"stage3_param_persistence_threshold": size}


@cache
def plain(name: str, parts: int = 1, disturbed: bool = True) -> Run:
    model = zoo.build(name)
    return zoo.train_plainly(zoo.disturb(model) if disturbed else model, name, parts)


# ---------------------------------------------------------------------------------------------------- all models


def sharded(name: str) -> dict[str, Run]:
    """Everything sharded; then, in turn, stage 1, stage 2, and stage 3 with few or all small parameters whole."""

    def run(stage: int, **config: Any) -> Run:
        return zoo.train_sharded(zoo.disturb(zoo.build(name)), name, stage, **config)

    found, number = {"stage 3": run(3)}, list(zoo.ZOO).index(name) % 4
    if number < 2:
        found[f"stage {1 + number}"] = run(1 + number)
    else:
        most = (1000, DEFAULT)[number - 2]
        found[f"stage 3, {most} elements stay whole"] = run(3, zero_optimization=threshold(most))
    return found


@pytest.mark.parametrize("name", zoo.ZOO)
def test_sharded_training_equals_plain_training(ranks: Ranks, name: str) -> None:
    """On the whole batch. A model that sums over rows in fp32 is also compared, to 1e-10, with the same two sums."""
    answers = ranks.run(2, sharded, name)
    in_fp32 = zoo.ZOO[name].sums_rows_in_fp32
    for how in answers[0]:
        runs = [answer[how] for answer in answers]
        zoo.check(runs, plain(name), 1e-7 if in_fp32 else 1e-10, how)
        if in_fp32:
            zoo.check(runs, plain(name, parts=2), 1e-10, how)


def test_the_zoo_holds_what_makes_models_different() -> None:
    """Tied, frozen and unused parameters, experts without a token on one rank; gradients that clipping changes."""
    models = {name: zoo.build(name) for name in zoo.ZOO}

    def without_gradient(name: str, rank: int, num_ranks: int) -> set[str]:
        models[name].zero_grad()
        models[name](**zoo.share(zoo.batches(name, 1)[0], rank, num_ranks)).loss.backward()
        return {key for key, p in models[name].named_parameters() if p.requires_grad and p.grad is None}

    assert len(models["llama-tied"].state_dict()) > len(list(models["llama-tied"].parameters()))
    assert any(not parameter.requires_grad for parameter in models["whisper"].parameters())
    assert without_gradient("clip", 0, 1)
    assert without_gradient("switch", 0, 1) < without_gradient("switch", 0, 2)
    assert without_gradient("switch", 0, 2) != without_gradient("switch", 1, 2)
    assert all(norm > zoo.CLIP for name in models for norm in plain(name)[1])


# ------------------------------------------------------------------------------------- experts by another kernel


def with_kernel(kernel: str) -> nn.Module:
    dtype = torch.float32 if kernel == "grouped_mm" else torch.float64
    return zoo.disturb(zoo.build("mixtral", dtype, experts_implementation=kernel))


def train_with_kernel(kernel: str) -> Run:
    return zoo.train_sharded(with_kernel(kernel), "mixtral", 3)


@pytest.mark.parametrize(("kernel", "tolerance"), [("batched_mm", 1e-10), ("grouped_mm", 1e-6)])
def test_experts_computed_by_another_kernel(ranks: Ranks, kernel: str, tolerance: float) -> None:
    """The grouped one has no fp64. In fp32, AdamW stays close where no gradient is rounding noise alone."""
    answers = ranks.run(2, train_with_kernel, kernel)
    model = with_kernel(kernel)
    zoo.check(answers, zoo.train_plainly(model, "mixtral"), tolerance)
    assert all(parameter.grad.abs().max() > 1e-5 for parameter in model.parameters())


# ------------------------------------------------------------------------------------------------- recomputation


def recomputed(name: str) -> dict[str, Run]:
    last, before = ("non-reentrant", "reentrant") if name in ("t5", "whisper") else ("reentrant", "non-reentrant")
    return {
        f"{how}, stage {stage}": zoo.train_sharded(zoo.recompute(zoo.disturb(zoo.build(name)), how), name, stage)
        for how, stage in ((last, 3), (before, 2))
    }


@pytest.mark.parametrize("name", ["llama", "t5", "mixtral", "whisper", "gpt2"])
def test_gradient_checkpointing_equals_plain_training(ranks: Ranks, name: str) -> None:
    answers = ranks.run(2, recomputed, name)
    for how in answers[0]:
        zoo.check([answer[how] for answer in answers], plain(name), what=how)


# ------------------------------------------------------------------------------------------------- sharded birth


def born_sharded(name: str) -> tuple[dict[str, Tensor], Run]:
    with shardwell.zero.Init(config_dict_or_path=zero(3)):
        model = zoo.build(name)
    assert all(isinstance(parameter, ReleasedParameter) for parameter in model.parameters())
    return whole_parameters(model), zoo.train_sharded(model, name, 3)


@pytest.mark.parametrize("name", ["llama", "t5", "gpt2", "mixtral", "whisper"])
def test_construction_inside_init_gives_the_same_weights(ranks: Ranks, name: str) -> None:
    expected = dict(zoo.build(name).named_parameters())
    answers = ranks.run(2, born_sharded, name)
    for weights, _ in answers:
        assert weights.keys() == expected.keys()
        for key, values in expected.items():
            assert (torch.as_tensor(weights[key]) == values).all(), key
    zoo.check([run for _, run in answers], plain(name, disturbed=False))
