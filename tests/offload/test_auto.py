"""`commit: "auto"` never changes numbers: whatever a loop does before its step follows plain PyTorch."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.optim.habit import STEPS_TO_LEARN, Phase
from tests.offload.loops import ODD, Net, Plain, Sharded, Step, check_alike, config_for, plain, played
from tests.offload.test_disk_state import quickly
from tests.ranks import Ranks

TIERS = ["none", "cpu", "nvme"]
KEY = '"shardwell": {"commit": "after_norm"}'


def named(name: str) -> Step:
    return next(step for step in ODD if step.__name__ == name)


def from_the_start(stage: int, path: str) -> None:
    """Every odd loop on every tier, against plain PyTorch."""
    quickly()
    for step in ODD:
        expected = played(Plain(Net()), iter([step, plain, step, plain]))
        for tier in TIERS:
            found = played(Sharded(Net(), config_for(stage, tier, path)), iter([step, plain, step, plain]))
            try:
                check_alike(expected, found)
            except AssertionError as error:
                raise AssertionError(f"{step.__name__} with offload to {tier}: {error}") from error


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_comes_between_backward_and_step_gives_the_numbers_of_plain_pytorch(
    ranks: Ranks, tmp_path: Path, stage: int
) -> None:
    ranks.run(2, from_the_start, stage, str(tmp_path))


def later(stage: int, name: str, tier: str, path: str) -> str:
    """An odd step after updates began to go at once: what was raised."""
    quickly()
    on = played(Sharded(Net(), config_for(stage, tier, path)), repeat(plain, STEPS_TO_LEARN + 1))
    assert on.optimizer.habit.phase is Phase.AT_ONCE
    try:
        played(on, iter([named(name), plain]))
    except ShardwellError as error:
        return str(error)
    odd = chain(repeat(plain, STEPS_TO_LEARN + 1), ())
    expected = played(played(Plain(Net()), odd), iter([named(name), plain]))
    check_alike(expected, on)
    return ""


BEFORE = ["two_losses", "one_graph_twice"]  # known before anything is updated


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", [step.__name__ for step in ODD if step.__name__ not in BEFORE])
def test_a_loop_that_changes_after_updates_went_at_once_is_told_so_on_all_ranks(
    ranks: Ranks, tmp_path: Path, stage: int, name: str
) -> None:
    for message in ranks.run(2, later, stage, name, "cpu", str(tmp_path)):
        assert KEY in message
        assert "between a backward and its step" in message


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", BEFORE)
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
            went += [any(unit.is_ahead for unit in on.engine._flow.units)] if micro == accumulation - 1 else []
            on.step()
        on.look()
    return on.values(), went


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_plain_loops_go_at_once_after_three_steps_with_the_same_bits(
    ranks: Ranks, tmp_path: Path, stage: int, tier: str, accumulation: int
) -> None:
    expected, never = ranks.run(2, trained, stage, tier, str(tmp_path), "after_norm", accumulation)[0]
    for found, went in ranks.run(2, trained, stage, tier, str(tmp_path), "auto", accumulation):
        assert not any(never)
        assert went == [False] * STEPS_TO_LEARN + [True] * 3
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name
