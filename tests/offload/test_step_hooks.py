"""Hooks on the steps of a given optimizer, and closures: as with the torch optimizer alone, whoever does the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

import shardwell
from shardwell.errors import ShardwellError
from tests.support.before_step_loops import Net, Plain, check_alike, config_for, rows
from tests.support.offload_cases import quickly
from tests.support.ranks import Ranks


def hooked(stage: int, tier: str, path: str, kind: str) -> list[tuple[str, bool, int, dict[str, Any], bool]]:
    """What hooks were told in two steps."""
    quickly()
    model = Net()
    given = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    calls: list[tuple[str, bool, int, dict[str, Any], bool]] = []

    def note(when: str) -> Any:
        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            calls.append((when, optimizer is given, len(args), kwargs, args[0] is given))

        return hook

    given.register_step_pre_hook(note("before"))
    engine = shardwell.initialize(model=model, optimizer=given, config=config_for(stage, tier, path)).engine
    given.register_step_post_hook(note("after"))
    for number in range(2):
        engine.backward(engine(rows(number)).square().mean())
        engine.step()
    return calls


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("kind", ["AdamW", "NAdam"])
def test_step_hooks_of_the_given_optimizer_run_once_for_each_step(
    ranks: Ranks, tmp_path: Path, tier: str, kind: str
) -> None:
    if kind == "NAdam" and tier == "nvme":
        pytest.skip("state on disk is stepped by kernels, and there is none for NAdam")
    once = [("before", True, 1, {}, True), ("after", True, 1, {}, True)]
    assert ranks.run(1, hooked, 2, tier, str(tmp_path), kind) == [once * 2]


def in_chunks() -> tuple[list[str], list[str]]:
    """Hooks of two steps over a model that is stepped in several calls, and the names that a profiler sees."""
    model = torch.nn.Sequential(*[torch.nn.Linear(2200, 2200, bias=False) for _ in range(3)])
    given, calls = torch.optim.SGD(model.parameters(), lr=0.1), list[str]()
    given.register_step_pre_hook(lambda *args: calls.append("before"))
    given.register_step_post_hook(lambda *args: calls.append("after"))
    engine = shardwell.initialize(model=model, optimizer=given, config=config_for(1, "none", "")).engine
    engine.backward(engine(torch.ones(1, 2200)).mean())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.step()
    return calls, [event.name for event in profile.events() if event.name.startswith("Optimizer.step#SGD")]


def test_a_step_in_several_parts_is_one_for_hooks_and_profilers(ranks: Ranks) -> None:
    assert ranks.run(1, in_chunks) == [(["before", "after"], ["Optimizer.step#SGD.step"])]


def with_a_rate_from_a_hook(stage: int, tier: str) -> None:
    """A hook that sets the learning rate before each step counts, with updates at once and without."""
    expected = Plain(Net())
    model = Net()
    given = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    engine = shardwell.initialize(model=model, optimizer=given, config=config_for(stage, tier, "")).engine
    for optimizer in (expected.optimizer, given):
        optimizer.register_step_pre_hook(lambda one, args, kwargs: halve(one))
    for number in range(6):
        expected.backward(expected.loss(number))
        expected.step()
        engine.backward(engine(rows(number)).square().mean())
        engine.step()
    found = Plain(Net())
    found.values = lambda: values_of(engine)  # type: ignore[method-assign]
    check_alike(expected, found)


def halve(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def values_of(engine: shardwell.Engine) -> dict[str, Tensor]:
    return dict(engine.state_dict())


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_a_hook_that_sets_the_learning_rate_counts(ranks: Ranks, tier: str) -> None:
    ranks.run(1, with_a_rate_from_a_hook, 2, tier)


def with_a_closure(stage: int, tier: str) -> None:
    expected, model = Plain(Net()), Net()
    given = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    started = shardwell.initialize(model=model, optimizer=given, config=config_for(stage, tier, ""))

    for number in range(5):

        def closure(number: int = number) -> Tensor:
            started.optimizer.zero_grad()
            loss = started.engine(rows(number)).square().mean()
            started.engine.backward(loss)
            return loss

        loss = expected.loss(number)
        expected.backward(loss)
        expected.step()
        torch.testing.assert_close(started.optimizer.step(closure), loss)
    found = Plain(Net())
    found.values = lambda: values_of(started.engine)  # type: ignore[method-assign]
    check_alike(expected, found)


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_a_closure_makes_the_gradients_of_its_step(ranks: Ranks, tier: str) -> None:
    ranks.run(1, with_a_closure, 2, tier)


def with_a_closure_from_a_hook() -> str:
    model = Net()
    given = torch.optim.SGD(model.parameters(), lr=0.2)
    given.register_step_pre_hook(lambda one, args, kwargs: ((one, lambda: None), {}))
    engine = shardwell.initialize(model=model, optimizer=given, config=config_for(2, "none", "")).engine
    engine.backward(engine(rows(0)).square().mean())
    try:
        engine.step()
    except ShardwellError as error:
        return str(error)
    return ""


def test_a_hook_that_adds_a_closure_is_refused_in_words(ranks: Ranks) -> None:
    assert "closure" in ranks.run(1, with_a_closure_from_a_hook)[0]


def of_the_engines_optimizer() -> list[str]:
    """Hooks of the optimizer that `initialize` returns, and those for all optimizers, in a step of each kind."""
    model, calls = Net(), list[str]()
    given = torch.optim.SGD(model.parameters(), lr=0.2)
    started = shardwell.initialize(model=model, optimizer=given, config=config_for(2, "cpu", ""))
    started.optimizer.register_step_post_hook(lambda *args: calls.append("own"))
    handle = register_optimizer_step_post_hook(lambda *args: calls.append("all"))
    for step in (started.engine.step, started.optimizer.step, given.step):
        started.engine.backward(started.engine(rows(0)).square().mean())
        step()
    handle.remove()
    return calls


def test_hooks_of_the_engines_optimizer_and_those_for_all_run_once_for_each_step(ranks: Ranks) -> None:
    assert ranks.run(1, of_the_engines_optimizer) == [["own", "all"] * 3]
