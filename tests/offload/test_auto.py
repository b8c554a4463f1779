"""`commit: "auto"` never changes numbers: whatever a loop does before its step follows plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.offload.auto_commit import STEPS_TO_LEARN, CommitPhase
from tests.support.before_step_loops import (
    ODD,
    WIDTH,
    Net,
    Plain,
    Sharded,
    Step,
    check_alike,
    config_for,
    plain,
    played,
)
from tests.support.internals import units_of
from tests.support.offload_cases import quickly
from tests.support.ranks import Ranks

TIERS = ["none", "cpu", "nvme"]
KEY = '"shardwell": {"commit": "after_norm"}'


def named(name: str) -> Step:
    return next(step for step in ODD if step.__name__ == name)


def from_the_start(stage: int, path: str) -> None:
    """Every other odd loop against plain PyTorch, on one tier: each loop meets two stages and two tiers."""
    quickly()
    for number, step in enumerate(ODD):
        if number % 2 != stage % 2:
            continue
        tier = TIERS[(number // 2 + stage // 2) % len(TIERS)]
        expected = played(Plain(Net()), iter([step, plain, step, plain]))
        found = played(Sharded(Net(), config_for(stage, tier, path)), iter([step, plain, step, plain]))
        try:
            check_alike(expected, found)
        except AssertionError as error:
            raise AssertionError(f"{step.__name__} with offload to {tier}: {error}") from error
        found.engine.destroy(whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_comes_between_backward_and_step_gives_the_numbers_of_plain_pytorch(
    ranks: Ranks, tmp_path: Path, stage: int
) -> None:
    ranks.run(2, from_the_start, stage, str(tmp_path))


def later(stage: int, name: str, tier: str, path: str) -> str:
    """An odd step after updates began to go at once: what was raised."""
    quickly()
    on = played(Sharded(Net(), config_for(stage, tier, path)), repeat(plain, STEPS_TO_LEARN + 1))
    assert on.optimizer.executor.auto.phase is CommitPhase.AT_ONCE
    try:
        played(on, iter([named(name), plain]))
    except ShardwellError as error:
        return str(error)
    expected = played(played(Plain(Net()), repeat(plain, STEPS_TO_LEARN + 1)), iter([named(name), plain]))
    check_alike(expected, on)
    return ""


BEFORE = ["two_losses", "one_graph_twice"]  # known before anything is updated


CHANGED = [step.__name__ for step in ODD if step.__name__ not in BEFORE]


@pytest.mark.parametrize(  # each at stage 3 and at one of the others
    ("stage", "name"), [(stage, name) for k, name in enumerate(CHANGED) for stage in ((0, 1, 2)[k % 3], 3)]
)
def test_a_loop_that_changes_after_updates_went_at_once_is_told_so_on_all_ranks(
    ranks: Ranks, tmp_path: Path, stage: int, name: str
) -> None:
    for message in ranks.run(2, later, stage, name, "cpu", str(tmp_path)):
        assert KEY in message
        assert "between a backward and its step" in message


@pytest.mark.parametrize(("stage", "name"), [(0, BEFORE[0]), (1, BEFORE[1]), (2, BEFORE[1]), (3, BEFORE[0])])
def test_a_graph_of_another_kind_waits_for_the_norm(ranks: Ranks, tmp_path: Path, stage: int, name: str) -> None:
    assert ranks.run(2, later, stage, name, "cpu", str(tmp_path)) == ["", ""]


def trained(stage: int, tier: str, path: str, commit: str, accumulation: int) -> tuple[dict[str, Tensor], list[bool]]:
    """The parameters after six plain steps with evaluations between them, and in which steps updates went at once."""
    quickly()
    config = config_for(stage, tier, path, commit=commit) | {"gradient_accumulation_steps": accumulation}
    on, went = Sharded(Net(), config), []
    for number in range(6):
        for micro in range(accumulation):
            loss = on.loss(10 * number + micro)
            on.optimizer.zero_grad() if micro == 0 else None  # as many loops have it
            on.backward(loss)
            went += [any(unit.updates.is_early for unit in units_of(on.engine))] if micro == accumulation - 1 else []
            on.step()
        on.look()
    return on.values(), went


@pytest.mark.parametrize(  # every pair of values
    ("stage", "tier", "accumulation"),
    [(1, "cpu", 1), (1, "nvme", 2), (2, "cpu", 2), (2, "nvme", 1), (3, "cpu", 1), (3, "nvme", 2)],
)
def test_plain_loops_go_at_once_after_three_steps_with_the_same_bits(
    ranks: Ranks, tmp_path: Path, stage: int, tier: str, accumulation: int
) -> None:
    expected, never = ranks.run(2, trained, stage, tier, str(tmp_path), "after_norm", accumulation)[0]
    for found, went in ranks.run(2, trained, stage, tier, str(tmp_path), "auto", accumulation):
        assert not any(never)
        assert went == [False] * STEPS_TO_LEARN + [True] * 3
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


# ------------------------------------------------------------------------------------------------- units on the device


PLACED = {"placement": "auto", "memory": {"device": 3000}}  # all but the last block; with all of them there is no host


def placed(name: str) -> tuple[list[bool], str]:
    """Units on the device by placement: odd steps from the start, then plain ones, and odd ones after those."""
    played_odd = [named(name), plain, plain, plain, plain]
    config = config_for(3, "cpu", "", **PLACED)
    check_alike(played(Plain(Net()), iter(played_odd)), played(Sharded(Net(), config), iter(played_odd)))
    on = played(Sharded(Net(), config), repeat(plain, STEPS_TO_LEARN))
    on.backward(on.loss(STEPS_TO_LEARN))
    went = [unit.updates.is_early for unit in units_of(on.engine)]
    on.step()
    try:
        named(name)(on, 9)
    except ShardwellError as error:
        return went, str(error)
    return went, ""


@pytest.mark.parametrize("name", ["evaluated_before_the_step", "left_out"])
def test_units_that_placement_puts_on_the_device_are_watched_too(ranks: Ranks, name: str) -> None:
    for went, message in ranks.run(2, placed, name):
        assert went == [False, True, True]  # the reduce of the first block still is on its way
        assert KEY in message


# ------------------------------------------------------------------------------------------------------- other doors


def going_at_once(stage: int, **own: Any) -> Sharded:
    on = played(Sharded(Net(), config_for(stage, "cpu", "", **own)), repeat(plain, STEPS_TO_LEARN + 1))
    assert on.optimizer.executor.auto.phase is CommitPhase.AT_ONCE
    return on


def met(act: Callable[[], Any]) -> str:
    try:
        act()
    except ShardwellError as error:
        return str(error)
    return ""


def loaded_after_an_error(stage: int, folder: str) -> list[str]:
    on = going_at_once(stage)
    on.engine.save_checkpoint(folder, "some")
    before = on.values()
    on.backward(on.loss(8))
    messages = [met(lambda: on.engine.save_checkpoint(folder, "none")), met(on.look), met(on.look)]
    assert on.engine.load_checkpoint(folder, "some")[0] is not None
    for name, value in on.values().items():
        assert torch.equal(value, before[name]), name
    expected = played(Plain(Net()), repeat(plain, STEPS_TO_LEARN + 1))
    check_alike(played(expected, iter([plain])), played(on, iter([plain])))
    return messages


@pytest.mark.parametrize("stage", [2, 3])
def test_the_error_comes_to_everybody_until_a_checkpoint_is_loaded(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    assert all(KEY in message for message in ranks.run(1, loaded_after_an_error, stage, str(tmp_path))[0])


def read_directly(stage: int) -> list[str]:
    on = going_at_once(stage)
    on.backward(on.loss(8))
    last = on.engine.module.blocks[2]
    halved: Callable[[], Any] = lambda: last.weight.data.mul_(0.5)  # noqa: E731
    return [met(lambda: last.weight.sum()), met(halved), met(lambda: last(torch.ones(1, WIDTH)))]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_that_rest_whole_are_not_read_half_updated(ranks: Ranks, stage: int) -> None:
    for messages in ranks.run(1, read_directly, stage):
        assert [KEY in message for message in messages] == [True] * 3


def kept_graphs(stage: int) -> str:
    """A loop that keeps its graphs, and goes through one again after updates were made."""
    on = Sharded(Net(), config_for(stage, "cpu", ""))
    for number in range(STEPS_TO_LEARN + 1):
        on.backward(on.loss(number), retain_graph=True)
        on.step()
    loss = on.loss(9)
    on.backward(loss, retain_graph=True)
    return met(lambda: torch.autograd.grad(loss, [on.engine.module.blocks[0].weight], allow_unused=True))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_graph_that_is_gone_through_again_meets_no_updated_weights(ranks: Ranks, stage: int) -> None:
    assert all(KEY in message for message in ranks.run(2, kept_graphs, stage))


def odd_on_one_rank(stage: int) -> tuple[str, list[str]]:
    """What one rank alone does in the first steps keeps all ranks from going at once, with one line."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardwell")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        on = Sharded(Net(), config_for(stage, "cpu", ""))
        for number in range(STEPS_TO_LEARN + 2):
            on.backward(on.loss(number))
            if dist.get_rank() == 1 and number == 1:
                on.engine.module.blocks[2].weight.sum()
            on.step()
        check_alike(played(Plain(Net()), repeat(plain, STEPS_TO_LEARN + 2)), on)
        return on.optimizer.executor.auto.phase.name, [line for line in lines if "commit" in line]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def test_what_one_rank_does_is_heard_by_all_and_said_in_one_line(ranks: Ranks) -> None:
    (first, lines), (second, _) = ranks.run(2, odd_on_one_rank, 2)
    assert first == second == CommitPhase.AFTER_NORM.name
    assert len(lines) == 1
    assert "updates wait for the norm from now on" in lines[0]


def skipping() -> tuple[bool, str]:
    """A loss that is not finite in a loop that leaves such steps out, once it could go at once."""
    on = played(Sharded(Net(), config_for(2, "cpu", "", nonfinite="skip")), repeat(plain, STEPS_TO_LEARN + 1))
    before = on.values()
    first = on.engine.module.blocks[0]  # whose gradients come last, and alone are not finite
    first.register_forward_hook(lambda *args: args[2].register_hook(lambda grad: grad * float("inf")) and None)
    on.backward(on.loss(9))
    on.step()
    return all(
        torch.equal(value, before[name]) for name, value in on.values().items()
    ), on.optimizer.executor.auto.phase.name


def test_steps_that_are_left_out_leave_nothing_behind(ranks: Ranks) -> None:
    assert all(is_same for is_same, _ in ranks.run(2, skipping))
