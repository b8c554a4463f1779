"""Settings and rates of parameter groups reach the parameters that they were saved for, or the load says why not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import SequentialLR, StepLR

import shardwell
from shardwell.errors import CheckpointError
from tests.support.ranks import Ranks

Groups = Callable[[nn.Module], list[dict[str, Any]]]


def grouped(*settings: tuple[str, float]) -> Groups:
    """One group for each beginning or end of names, with its rate."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [{"params": [p for name, p in named if part in name], "lr": rate} for part, rate in settings]

    return groups


def engine_of(groups: Groups, *, stage: int = 2, schedule: Any = None, config: Any = None) -> shardwell.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(groups(model))
    own = {"shard_at_world_one": True}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "shardwell": own,
        **(config or {}),
    }
    made = None if schedule is None else schedule(optimizer)
    return shardwell.initialize(model=model, optimizer=optimizer, lr_scheduler=made, config=config, device="cpu").engine


def train(engine: shardwell.Engine, steps: int = 1) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()


WEIGHTS_FIRST, BIASES_FIRST = grouped(("weight", 0.1), ("bias", 0.2)), grouped(("bias", 0.2), ("weight", 0.1))


def reorder(root: str, stage: int) -> tuple[str, list[float], list[float]]:
    engine = engine_of(WEIGHTS_FIRST, stage=stage)
    train(engine)
    engine.save_checkpoint(root)
    other = engine_of(BIASES_FIRST, stage=stage)
    before = other.get_lr()
    try:
        other.load_checkpoint(root)
        said = ""
    except CheckpointError as error:
        said = str(error)
    after = other.get_lr()
    other.load_checkpoint(root, load_optimizer_states=False, load_lr_scheduler_states=False)
    return said, before, after


@pytest.mark.parametrize("stage", [1, 3])
def test_groups_in_another_order_are_refused_by_the_name_of_a_parameter(
    ranks: Ranks, tmp_path: Path, stage: int
) -> None:
    for said, before, after in ranks.run(2, reorder, str(tmp_path), stage):
        assert "was in parameter group 0 and is in group 1 of this optimizer, with other settings" in said
        assert before == after == [0.2, 0.1]


def test_groups_in_another_order_with_equal_settings_are_loaded(tmp_path: Path) -> None:
    engine_of(grouped(("weight", 0.3), ("bias", 0.3))).save_checkpoint(tmp_path)
    other = engine_of(BIASES_FIRST)
    other.load_checkpoint(tmp_path)
    assert other.get_lr() == [0.3, 0.3]


def test_a_parameter_that_moved_to_another_group_is_named(tmp_path: Path) -> None:
    engine_of(grouped(("0.", 0.1), ("1.", 0.2))).save_checkpoint(tmp_path)
    moved = grouped(("0.weight", 0.5), ("1.", 0.6))

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, second = moved(model)
        second["params"].append(dict(model.named_parameters())["0.bias"])
        return [first, second]

    other = engine_of(groups)
    with pytest.warns(UserWarning, match=r"'0\.bias' was in parameter group 0 .* settings of group 1 now"):
        other.load_checkpoint(tmp_path)
    assert other.get_lr() == [0.1, 0.2]


def staged(optimizer: torch.optim.Optimizer) -> SequentialLR:
    return SequentialLR(optimizer, [StepLR(optimizer, 2), StepLR(optimizer, 3)], [4])


@pytest.mark.parametrize("schedule", [lambda optimizer: StepLR(optimizer, 2), staged])
def test_a_schedule_of_another_number_of_groups_is_refused(tmp_path: Path, schedule: Any) -> None:
    engine = engine_of(WEIGHTS_FIRST, schedule=schedule)
    train(engine)
    engine.save_checkpoint(tmp_path)
    other = engine_of(grouped(("", 0.7)), schedule=schedule)
    with pytest.raises(CheckpointError, match=r"2 value\(s\), one for each parameter group, .* has 1 group"):
        other.load_checkpoint(tmp_path)
    assert other.lr_scheduler.state_dict()["last_epoch"] == 0
    with pytest.warns(UserWarning, match="settings stay as they are"):
        other.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert other.get_lr() == [0.7]


def test_what_a_checkpoint_in_the_middle_of_training_lacks_is_said(tmp_path: Path) -> None:
    engine = engine_of(WEIGHTS_FIRST)
    train(engine, 2)
    engine.save_checkpoint(tmp_path / "no schedule")
    other = engine_of(WEIGHTS_FIRST, schedule=lambda optimizer: StepLR(optimizer, 2))
    with pytest.warns(UserWarning, match="step 2 holds nothing of a schedule: StepLR stays at its place"):
        other.load_checkpoint(tmp_path / "no schedule")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_checkpoint(tmp_path / "no schedule", load_lr_scheduler_states=False)
