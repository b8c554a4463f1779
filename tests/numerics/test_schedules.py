"""Learning rates over shards are those of a plain optimizer, however the schedule is handed over."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torchs

import shardwell
from shardwell.config import SCHEDULERS, SchedulerConfig
from shardwell.optim.lr_schedules import by_name
from tests.support.models import zero
from tests.support.optimizer_models import build, groups_of, train, train_plainly
from tests.support.ranks import Ranks

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: torchs.StepLR(optimizer, 2, 0.1),
    "cosine": lambda optimizer: torchs.CosineAnnealingLR(optimizer, 7),
    "one cycle": lambda optimizer: torchs.OneCycleLR(optimizer, [0.1, 0.2], total_steps=20),
    "lambda": lambda optimizer: torchs.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n)]),
    "sequence": lambda optimizer: torchs.SequentialLR(
        optimizer, [torchs.ConstantLR(optimizer, 0.1), torchs.ExponentialLR(optimizer, 0.9)], [3]
    ),
}
BLOCKS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": [0.1, 0.2], "warmup_num_steps": 5},
    "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 7},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 8, "warmup_type": "linear"},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "decay_step_size": 2,
                 "decay_lr_rate": 0.5},
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2},
}  # fmt: skip


def follow(engine: shardwell.Engine) -> list[tuple[Any, ...]]:
    found = []
    for _ in range(8):
        found.append(tuple((group["lr"], tuple(group["betas"])) for group in engine.optimizer.param_groups))
        train(engine, range(1), torch.float32)
    return found


def rates_by_engine(stage: int) -> dict[str, Any]:
    found = {}
    for name, make in SCHEDULES.items():
        for how in ("callable", "object", "on the engine's optimizer"):
            model = build(torch.float32)
            optimizer = torch.optim.AdamW(groups_of(model, 0.01))
            schedule = {"callable": lambda o, make=make: make(o), "object": None}.get(how)
            if how == "object":
                schedule = make(optimizer)
            engine = shardwell.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=zero(stage))[
                0
            ]
            if how == "on the engine's optimizer":
                engine.lr_scheduler = make(engine.optimizer)
            found[name, how] = follow(engine)
    for name, params in BLOCKS.items():
        model = build(torch.float32)
        config = zero(stage, scheduler={"type": name.lower(), "params": params})
        optimizer = torch.optim.AdamW(groups_of(model, 0.01))
        initialized = shardwell.initialize(model=model, optimizer=optimizer, config=config)
        assert initialized.lr_scheduler is initialized.engine.lr_scheduler
        found[name, "block"] = follow(initialized.engine)
    return {" ".join(key): value for key, value in found.items()}


def plain_rates(make: Callable[[Optimizer], Any]) -> list[tuple[Any, ...]]:
    model = build(torch.float32)
    optimizer = torch.optim.AdamW(groups_of(model, 0.01))
    schedule, found = make(optimizer), []
    for _ in range(8):
        found.append(tuple((group["lr"], tuple(group["betas"])) for group in optimizer.param_groups))
        train_plainly(model, optimizer, range(1))
        schedule.step()
    return found


@pytest.mark.slow
def test_schedules_give_the_rates_that_they_give_a_plain_optimizer(ranks: Ranks) -> None:
    assert set(BLOCKS) == set(SCHEDULERS)
    expected = {name: plain_rates(make) for name, make in SCHEDULES.items()}
    for name, params in BLOCKS.items():
        expected[name] = plain_rates(partial(by_name, SchedulerConfig(type=name, params=params)))
    for answer in ranks.run(1, rates_by_engine, 1):
        assert len(answer) == 3 * len(SCHEDULES) + len(BLOCKS)
        for what, found in answer.items():
            name = next(name for name in expected if what.startswith(name))
            assert found == expected[name], what


def test_a_schedule_in_the_code_without_an_optimizer_is_an_error() -> None:
    with pytest.raises(shardwell.ConfigError, match="no optimizer"):
        shardwell.initialize(
            model=build(), lr_scheduler=lambda optimizer: torchs.StepLR(optimizer, 1), config=zero(1), device="cpu"
        )


KINDS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "on the device": (torch.optim.SGD, {}),
    "on the host": (torch.optim.SGD, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    "a step that is left out": (torch.optim.SGD, {"fp16": {"enabled": True, "initial_scale_power": 40}}),
    "torch's Muon": (torch.optim.Muon, {}),
}


def warnings_of(kind: str, is_right: bool, of_the_engine: bool) -> list[str]:
    """What torch says of a loop that steps the schedule behind the optimizer, or before it."""
    make, extra = KINDS[kind]
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = make(model.parameters(), lr=0.1)
    schedule = None if of_the_engine else torchs.StepLR(optimizer, 2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(2, **extra)).engine
    schedule = schedule or torchs.StepLR(engine.optimizer, 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).float().square().mean())
            for step in (engine.step, schedule.step) if is_right else (schedule.step, engine.step):
                step()
    return [str(warning.message) for warning in said if "lr_scheduler.step()" in str(warning.message)]


@pytest.mark.parametrize("of_the_engine", [True, False], ids=["over shards", "of the user"])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_warns_of_the_loops_that_are_wrong(ranks: Ranks, kind: str, of_the_engine: bool) -> None:
    assert ranks.run(1, warnings_of, kind, True, of_the_engine) == [[]]
    assert len(ranks.run(1, warnings_of, kind, False, of_the_engine)[0]) == 1
