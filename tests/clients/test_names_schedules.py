"""DeepSpeed's schedules as classes: their numbers, on any torch optimizer."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
import torch

from shardwell.compat.deepspeed_api import lr_schedules as lrs
from shardwell.compat.deepspeed_api.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR


def optimizer(*rates: Any, kind: Any = torch.optim.Adam) -> Any:
    return kind([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.1,)])


def run(schedule: Any, steps: int) -> list[float]:
    """The rate of each step, as the optimizer has it."""
    found = []
    for _ in range(steps):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
    return found


def test_warmup_begins_one_step_late_and_ends_at_each_groups_own_rate() -> None:
    owner = optimizer(0.1, 0.2)
    schedule = WarmupLR(owner, warmup_num_steps=4, warmup_type="linear")
    assert schedule.max_lrs == [0.1, 0.2]
    assert run(schedule, 6) == pytest.approx([0, 0, 0.025, 0.05, 0.075, 0.1])
    assert [group["lr"] for group in owner.param_groups] == pytest.approx([0.1, 0.2])
    logarithmic = run(WarmupLR(optimizer(), 0.0, 1.0, 10), 4)
    assert logarithmic == pytest.approx([0, 0, math.log(2) / math.log(10), math.log(3) / math.log(10)])


def test_decay_falls_to_the_lowest_rate_at_the_end() -> None:
    schedule = WarmupDecayLR(optimizer(), 8, 0.0, 1.0, 4, "linear")
    assert run(schedule, 11) == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0, 0])
    assert WarmupDecayLR(optimizer(), 8).max_lrs == [0.001]  # DeepSpeed's default, whatever the optimizer has


def test_cosine_takes_shares_of_each_groups_rate() -> None:
    owner = optimizer(0.1, 0.2)
    schedule = WarmupCosineLR(owner, total_num_steps=20, warmup_num_steps=10, cos_min_ratio=0.1)
    assert schedule.get_lr_ratio() == 0.0
    assert schedule.get_last_lr() == [0.0, 0.0]
    schedule.step(1)
    assert schedule.get_lr_ratio() == pytest.approx(math.log(2) / math.log(10))
    schedule.step(9)
    assert schedule.get_lr() == pytest.approx([0.1, 0.2])
    schedule.step(14)
    assert schedule.get_lr_ratio() == pytest.approx(0.55)  # the middle, one step early
    for step in (19, 25):
        schedule.step(step)
        assert schedule.get_lr() == pytest.approx([0.01, 0.02])


def test_a_cosine_without_room_to_decay_stays_at_its_end() -> None:
    schedule = WarmupCosineLR(optimizer(), total_num_steps=10, warmup_num_steps=10, cos_min_ratio=0.1)
    for step in range(10, 15):
        schedule.step(step)
        assert schedule.get_lr_ratio() == pytest.approx(0.1)


def test_one_cycle_moves_rate_and_momentum_against_each_other() -> None:
    owner = optimizer(0.1)
    schedule = OneCycle(owner, 0.001, 0.01, 0.5, 5, decay_step_size=2, decay_mom_rate=0.1)
    assert owner.param_groups[0]["betas"] == (0.8, 0.99)  # DeepSpeed begins with the lowest
    assert schedule.get_mom() == [(0.9, 0.99)]
    values = run(schedule, 13)
    assert values[0] == 0.001
    assert values[5] == pytest.approx(0.01)
    assert values[10] == pytest.approx(0.001)
    assert values[11] == pytest.approx(0.001 / (1 + 0.5 * 1 / 2)) == pytest.approx(schedule.min_lrs[0] / 1.25)
    schedule.step(4)
    assert owner.param_groups[0]["betas"] == pytest.approx((0.8, 0.99))
    schedule.step(10)
    assert schedule.get_mom()[0][0] == pytest.approx(0.9 * (1 + 0.1 / 2))


def test_one_cycle_has_a_value_for_each_group_and_refuses_other_lengths() -> None:
    owner = optimizer(0.1, 0.2)
    schedule = OneCycle(owner, [0.001, 0.002], [0.01, 0.02], 0.0, 5, 5, cycle_min_mom=[0.8, 0.85])
    schedule.step(4)
    assert [group["lr"] for group in owner.param_groups] == pytest.approx([0.01, 0.02])
    assert [group["betas"][0] for group in owner.param_groups] == pytest.approx([0.8, 0.85])
    with pytest.raises(ValueError, match="cycle_max_lr"):
        OneCycle(owner, 0.001, [0.01, 0.02, 0.03])


def test_stairs_hold_the_rate() -> None:
    def cycle(first: int, second: int) -> list[float]:
        return run(OneCycle(optimizer(), 0.0, 1.0, 0.0, 8, 8, first, second), 16)

    assert cycle(2, 2)[:9] == [0, 0, 0, 0, 0.5, 0.5, 0.5, 0.5, 1.0]
    assert cycle(8, 8) == pytest.approx(cycle(0, 0))
    assert cycle(2, 0)[9:] == pytest.approx(cycle(0, 0)[9:])


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, None), (-1, None), (0, 100), (100, -1)])
def test_a_cycle_without_steps_is_refused(first: int, second: int | None) -> None:
    with pytest.raises(ValueError, match="cycle_first_step_size"):
        OneCycle(optimizer(), 0.0, 1.0, cycle_first_step_size=first, cycle_second_step_size=second)


def test_a_cycle_may_have_no_second_half() -> None:
    schedule = OneCycle(optimizer(kind=torch.optim.SGD), 0.001, 0.1, 0.0, 100, 0)
    assert (schedule.step_ratio, schedule.cycle_momentum) == (1.0, False)
    assert schedule.get_lr() == [0.001]
    schedule.step()
    assert schedule.get_lr()[0] > 0.001


def test_a_range_test_grows_smoothly_or_in_stairs() -> None:
    assert run(LRRangeTest(optimizer(), 0.1, 2, 1.0), 5) == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])
    assert run(LRRangeTest(optimizer(), 0.1, 2, 1.0, True), 5) == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3])
    for size in (0, -5):
        with pytest.raises(ValueError, match="lr_range_test_step_size"):
            LRRangeTest(optimizer(), lr_range_test_step_size=size)


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (LRRangeTest, {}),
    (OneCycle, {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_momentum": False}),
    (WarmupLR, {"warmup_num_steps": 10}),
    (WarmupDecayLR, {"total_num_steps": 100, "warmup_num_steps": 10}),
    (WarmupCosineLR, {"total_num_steps": 100, "warmup_num_steps": 10}),
]


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(("kind", "params"), KINDS)
def test_a_rate_that_is_a_tensor_stays_that_tensor(kind: Any, params: dict[str, Any], shape: Any) -> None:
    rate = torch.full(shape, 0.1, dtype=torch.float64)
    owner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = kind(owner, **params)
    for _ in range(3):
        schedule.step()
        assert owner.param_groups[0]["lr"] is rate
        assert rate.shape == torch.Size(shape)
        assert rate.item() == pytest.approx(float(schedule.get_lr()[0]))


@pytest.mark.parametrize(("kind", "params"), KINDS)
def test_a_saved_schedule_goes_on_where_it_was(kind: Any, params: dict[str, Any]) -> None:
    schedule, other = kind(optimizer(), **params), kind(optimizer(), **params)
    run(schedule, 7)
    other.load_state_dict(schedule.state_dict())
    assert schedule.state_dict() == {"last_batch_iteration": 6}
    assert run(other, 5) == run(schedule, 5)


def test_every_valid_schedule_is_a_class_of_the_module() -> None:
    assert {getattr(lrs, name) for name in lrs.VALID_LR_SCHEDULES} == {kind for kind, _ in KINDS}


@pytest.mark.parametrize("kind", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
@pytest.mark.parametrize("steps", [None, -5, 1.5])
def test_a_warmup_of_no_number_is_refused(kind: Any, steps: Any) -> None:
    params = {} if kind is WarmupLR else {"total_num_steps": 100}
    with pytest.raises(ValueError, match="warmup_num_steps"):
        kind(optimizer(), warmup_num_steps=steps, **params)
    assert kind(optimizer(), warmup_num_steps=0, **params).warmup_num_steps == 2


def test_an_unknown_kind_of_warmup_is_logarithmic() -> None:
    assert WarmupCosineLR(optimizer(), 100, warmup_type="cubic").warmup_type == lrs.WARMUP_LOG_RATE
    assert WarmupLR(optimizer(), warmup_type="cubic").warmup_type == lrs.WARMUP_LOG_RATE


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="not a list"):
        WarmupLR([])


# --- options of a command line ----------------------------------------------------------------------------------


def options(*words: str) -> argparse.Namespace:
    return lrs.add_tuning_arguments(argparse.ArgumentParser()).parse_args(list(words))


@pytest.mark.parametrize("kind", [lrs.LR_RANGE_TEST, lrs.ONE_CYCLE, lrs.WARMUP_LR, lrs.WARMUP_DECAY_LR])
def test_options_become_a_schedule(kind: str) -> None:
    config, error = lrs.get_config_from_args(options("--lr_schedule", kind))
    assert error is None
    assert config is not None
    rate, reason = lrs.get_lr_from_config(config)
    assert rate in config["params"].values()
    assert reason == ""
    more = {"total_num_steps": 2000} if kind == lrs.WARMUP_DECAY_LR else {}
    lrs.from_config(config["type"], {**config["params"], **more}, optimizer())


def test_options_that_are_not_given_leave_the_schedules_defaults() -> None:
    config, _ = lrs.get_config_from_args(options("--lr_schedule", lrs.ONE_CYCLE, "--cycle_first_step_size", "4"))
    assert config is not None
    assert not {lrs.CYCLE_SECOND_STEP_SIZE, lrs.CYCLE_FIRST_STAIR_COUNT} & set(config["params"])
    assert config["params"][lrs.CYCLE_MOMENTUM] is False
    assert OneCycle(optimizer(), **config["params"]).second_step_size == 4


def test_a_cosine_from_options_has_shares_and_no_rate() -> None:
    config, _ = lrs.get_config_from_args(options("--lr_schedule", lrs.WARMUP_COSINE_LR, "--cos_min_ratio", "0.05"))
    assert config is not None
    assert config["params"][lrs.COS_MIN_RATIO] == 0.05
    assert lrs.WARMUP_MAX_LR not in config["params"]
    rate, reason = lrs.get_lr_from_config(config)
    assert rate is None
    assert lrs.WARMUP_COSINE_LR in reason


def test_options_without_a_schedule_say_so() -> None:
    assert lrs.get_config_from_args(options())[0] is None
    assert "Nope" in str(lrs.get_config_from_args(options("--lr_schedule", "Nope"))[1])
    assert lrs.get_lr_from_config({"type": "WarmupLR"})[0] is None
