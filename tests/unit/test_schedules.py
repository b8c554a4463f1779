"""Learning-rate schedules: their values against formulas written anew, resuming, and what is refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwell.config import SCHEDULERS, SchedulerConfig, load
from shardwell.errors import ConfigError, ShardwellError
from shardwell.optim.lr_schedules import KINDS, by_name


def adamw(*rates: float, **options: Any) -> AdamW:
    """One parameter group for each rate."""
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates or (0.5,)]
    return AdamW(groups, **options)


def sgd(**options: Any) -> SGD:
    return SGD([torch.zeros(1, requires_grad=True)], lr=0.5, **options)


def make(kind: str, optimizer: Optimizer | None = None, /, **params: Any) -> LRScheduler:
    return by_name(SchedulerConfig(type=kind, params=params), adamw() if optimizer is None else optimizer)


def steps(schedule: LRScheduler, count: int) -> Iterator[dict[str, Any]]:
    """The first parameter group as it is at steps 0, 1, ... count: what the next optimizer step would use."""
    yield dict(schedule.optimizer.param_groups[0])
    for _ in range(count):
        schedule.optimizer.step()
        schedule.step()
        yield dict(schedule.optimizer.param_groups[0])


def rates(kind: str, count: int, optimizer: Optimizer | None = None, **params: Any) -> list[float]:
    return [group["lr"] for group in steps(make(kind, optimizer, **params), count)]


def momenta(count: int, **params: Any) -> list[float]:
    return [group["betas"][0] for group in steps(make("OneCycle", **params), count)]


def refusal(kind: str, /, **params: Any) -> str:
    """What is said about the arguments, which must be refused."""
    with pytest.raises(ConfigError) as caught:
        make(kind, **params)
    return str(caught.value)


EXAMPLES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 0.1, "warmup_num_steps": 6},
    "WarmupDecayLR": {"total_num_steps": 12, "warmup_max_lr": 0.1, "warmup_num_steps": 4},
    "WarmupCosineLR": {"total_num_steps": 12, "warmup_num_steps": 4},
    "OneCycle": {
        "cycle_min_lr": 0.1,
        "cycle_max_lr": 0.4,
        "cycle_first_step_size": 3,
        "cycle_second_step_size": 5,
        "decay_step_size": 2,
        "decay_lr_rate": 0.5,
        "decay_mom_rate": 0.01,
    },
    "LRRangeTest": {"lr_range_test_step_size": 4},
}
every_kind = pytest.mark.parametrize("kind", SCHEDULERS)


# --- what they share --------------------------------------------------------------------------------------------


def test_the_configuration_names_exactly_the_schedules_that_exist() -> None:
    assert {name: kind.__name__ for name, kind in KINDS.items()} == {name: name for name in SCHEDULERS}


@every_kind
def test_a_schedule_is_a_torch_scheduler(kind: str) -> None:
    optimizer = adamw()
    schedule = make(kind, optimizer, **EXAMPLES[kind])
    assert isinstance(schedule, LRScheduler)
    assert schedule.optimizer is optimizer


@every_kind
def test_the_rate_in_force_is_the_one_that_is_told(kind: str) -> None:
    schedule = make(kind, adamw(0.5, 0.25), **EXAMPLES[kind])
    for _ in steps(schedule, 15):
        in_force = [group["lr"] for group in schedule.optimizer.param_groups]
        assert in_force == schedule.get_last_lr() == schedule.get_lr()


@every_kind
@pytest.mark.filterwarnings("error")
def test_steps_in_the_right_order_warn_of_nothing(kind: str) -> None:
    schedule = make(kind, **EXAMPLES[kind])
    list(steps(schedule, 2))
    schedule.load_state_dict(schedule.state_dict())
    list(steps(schedule, 2))


def settings(optimizer: Optimizer) -> list[tuple[Any, ...]]:
    return [(group["lr"], group["betas"]) for group in optimizer.param_groups]


@every_kind
@pytest.mark.parametrize("at", [0, 1, 4, 9, 14])
def test_a_resumed_schedule_goes_on_as_if_uninterrupted(kind: str, at: int) -> None:
    straight = make(kind, adamw(0.5, 0.25), **EXAMPLES[kind])
    list(steps(straight, at))
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = make(kind, adamw(0.5, 0.25), **EXAMPLES[kind])
    resumed.load_state_dict(state)
    for _ in zip(steps(straight, 6), steps(resumed, 6), strict=True):
        assert settings(resumed.optimizer) == settings(straight.optimizer)
        assert resumed.get_last_lr() == straight.get_last_lr()


@every_kind
def test_a_schedule_resumes_from_the_last_batch_iteration(kind: str) -> None:
    straight = make(kind, **EXAMPLES[kind])
    list(steps(straight, 5))
    resumed = make(kind, **EXAMPLES[kind], last_batch_iteration=4)
    assert settings(resumed.optimizer) == settings(straight.optimizer)
    assert resumed.state_dict() == straight.state_dict()


@every_kind
def test_a_schedule_resumes_over_a_resumed_optimizer(kind: str) -> None:
    straight = make(kind, **EXAMPLES[kind])
    list(steps(straight, 5))
    optimizer = adamw()
    optimizer.load_state_dict(copy.deepcopy(straight.optimizer.state_dict()))
    resumed = make(kind, optimizer, **EXAMPLES[kind])
    resumed.load_state_dict(straight.state_dict())
    assert settings(optimizer) == settings(straight.optimizer)


def test_after_a_resume_the_arguments_of_the_new_run_hold() -> None:
    schedule = make("WarmupLR", warmup_max_lr=0.2, warmup_num_steps=2)
    schedule.load_state_dict(make("WarmupLR", warmup_max_lr=0.1, last_batch_iteration=7).state_dict())
    assert schedule.get_last_lr() == [0.2]


def test_the_state_of_something_else_is_refused() -> None:
    with pytest.raises(ShardwellError, match="no state of WarmupLR"):
        make("WarmupLR").load_state_dict({"last_epoch": 3})


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = AdamW([torch.zeros(1, requires_grad=True)], lr=rate)
    schedule = make("WarmupCosineLR", optimizer, total_num_steps=4, warmup_num_steps=0, cos_min_ratio=0.0)
    list(steps(schedule, 2))
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.25)


# --- the formulas -----------------------------------------------------------------------------------------------


def test_a_log_warmup_rises_with_the_logarithm_and_stays() -> None:
    found = rates("WarmupLR", 14, warmup_min_lr=0.1, warmup_max_lr=0.9, warmup_num_steps=10)
    rise = [0.1 + 0.8 * math.log(step + 1, 10) for step in range(10)]
    assert found == pytest.approx(rise + [0.9] * 5)
    assert (found[0], found[9], found[10], found[14]) == pytest.approx((0.1, 0.9, 0.9, 0.9))


def test_a_linear_warmup_rises_evenly_and_stays() -> None:
    found = rates("WarmupLR", 7, warmup_max_lr=0.5, warmup_num_steps=5, warmup_type="linear")
    assert found == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


def test_a_warmup_has_the_defaults_that_people_know() -> None:
    found = rates("WarmupLR", 1000)  # up to the group's own rate
    assert found[1] == pytest.approx(0.5 * math.log(2) / math.log(1000))
    assert (found[0], found[1000]) == (0.0, 0.5)


def test_no_warmup_is_the_highest_rate_from_the_start() -> None:
    assert rates("WarmupLR", 2, warmup_max_lr=0.3, warmup_num_steps=0) == [0.3, 0.3, 0.3]


def test_a_warmup_of_one_step_counts_as_two() -> None:
    assert rates("WarmupLR", 2, warmup_max_lr=0.3, warmup_num_steps=1) == pytest.approx([0.0, 0.3, 0.3])


def test_a_warmup_without_highest_rate_rises_to_each_groups_own() -> None:
    schedule = make("WarmupLR", adamw(0.5, 0.25), warmup_max_lr=None, warmup_num_steps=2)
    list(steps(schedule, 3))
    assert schedule.get_last_lr() == [0.5, 0.25]


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_a_warmup_then_decays_evenly_to_the_lowest_rate(kind: str) -> None:
    found = rates("WarmupDecayLR", 22, total_num_steps=20, warmup_max_lr=0.8, warmup_num_steps=4, warmup_type=kind)
    rise = [math.log(step + 1, 4) if kind == "log" else step / 4 for step in range(4)]
    fall = [(20 - step) / 16 for step in range(4, 21)]
    assert found == pytest.approx([0.8 * height for height in [*rise, *fall, 0.0, 0.0]])
    assert (found[4], found[12], found[20]) == pytest.approx((0.8, 0.4, 0.0))


def test_a_decay_ends_at_the_lowest_rate() -> None:
    found = rates("WarmupDecayLR", 9, total_num_steps=8, warmup_min_lr=0.2, warmup_max_lr=0.6, warmup_num_steps=4)
    assert (found[6], found[8], found[9]) == pytest.approx((0.4, 0.2, 0.2))


def test_a_decay_without_warmup_starts_at_the_highest_rate() -> None:
    found = rates("WarmupDecayLR", 4, total_num_steps=4, warmup_max_lr=0.4, warmup_num_steps=0)
    assert found == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])


def test_a_warmup_of_the_whole_run_leaves_nothing_to_decay_in() -> None:
    found = rates("WarmupDecayLR", 5, total_num_steps=3, warmup_max_lr=0.3, warmup_num_steps=3, warmup_type="linear")
    assert found == pytest.approx([0.0, 0.1, 0.2, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_a_cosine_goes_from_the_own_rate_to_its_least_share(kind: str) -> None:
    params = {"total_num_steps": 24, "warmup_num_steps": 8, "warmup_min_ratio": 0.25, "cos_min_ratio": 0.1}
    found = rates("WarmupCosineLR", 27, adamw(0.5), warmup_type=kind, **params)
    rise = [0.25 + 0.75 * (math.log(step + 1, 8) if kind == "log" else step / 8) for step in range(8)]
    fall = [0.55 + 0.45 * math.cos(math.radians(180 * step / 16)) for step in range(17)]
    assert found == pytest.approx([0.5 * ratio for ratio in [*rise, *fall, 0.1, 0.1, 0.1]])
    assert (found[0], found[8], found[16], found[24]) == pytest.approx((0.125, 0.5, 0.275, 0.05))


CYCLE: dict[str, Any] = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4}


def test_a_cycle_goes_up_and_down_once() -> None:
    found = rates("OneCycle", 10, **CYCLE, cycle_second_step_size=2)
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.1, 0.1, 0.1, 0.1])


def test_the_second_half_of_a_cycle_is_as_long_as_the_first() -> None:
    assert rates("OneCycle", 9, **CYCLE)[4:] == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.1])


def test_after_the_cycle_the_rate_decays() -> None:
    found = rates("OneCycle", 14, **CYCLE, decay_step_size=3, decay_lr_rate=0.5)
    assert found[8:] == pytest.approx([0.1 / (1 + 0.5 * (step - 8) / 3) for step in range(8, 15)])


def test_decay_without_a_size_is_no_decay() -> None:
    assert rates("OneCycle", 20, **CYCLE, decay_lr_rate=0.5)[-1] == pytest.approx(0.1)


def test_a_cycle_can_have_stairs() -> None:
    found = rates("OneCycle", 8, **CYCLE, cycle_first_stair_count=2, cycle_second_stair_count=1)
    assert found == pytest.approx([0.1, 0.1, 0.3, 0.3, 0.5, 0.1, 0.1, 0.1, 0.1])


def test_stairs_of_the_first_half_hold_for_the_second() -> None:
    found = rates("OneCycle", 8, **CYCLE, cycle_first_stair_count=2)
    assert found == pytest.approx([0.1, 0.1, 0.3, 0.3, 0.5, 0.3, 0.3, 0.1, 0.1])


def test_momentum_goes_the_other_way() -> None:
    found = momenta(10, **CYCLE)
    assert found == pytest.approx([0.9, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9, 0.9])


def test_after_the_cycle_momentum_grows_and_stays_below_one() -> None:
    found = momenta(40, **CYCLE, decay_step_size=2, decay_mom_rate=0.02)
    growing = [0.9 * (1 + 0.02 * (step - 8) / 2) for step in range(8, 18)]
    assert found[8:18] == pytest.approx(growing)
    assert found[40] == pytest.approx(0.999)


def test_only_the_first_beta_is_a_momentum() -> None:
    groups = list(steps(make("OneCycle", adamw(betas=(0.5, 0.95)), **CYCLE), 3))
    assert {group["betas"][1] for group in groups} == {0.95}


def test_momentum_may_be_left_alone() -> None:
    assert momenta(3, **CYCLE, cycle_momentum=False) == [0.9] * 4
    assert momenta(0, **CYCLE, cycle_momentum=False, cycle_max_mom=0.7) == [0.9]


def test_momentum_by_its_own_name_is_cycled() -> None:
    groups = list(steps(make("OneCycle", sgd(momentum=0.3), **CYCLE), 4))
    assert [group["momentum"] for group in groups] == pytest.approx([0.9, 0.875, 0.85, 0.825, 0.8])


def test_an_optimizer_without_momentum_gets_none() -> None:
    groups = list(steps(make("OneCycle", sgd(), **CYCLE), 2))
    assert [group["momentum"] for group in groups] == [0, 0, 0]


def test_a_range_test_rises_evenly() -> None:
    found = rates("LRRangeTest", 6, lr_range_test_min_lr=0.1, lr_range_test_step_size=2, lr_range_test_step_rate=3.0)
    assert found == pytest.approx([0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0])


def test_a_range_test_can_have_stairs() -> None:
    params = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 3, "lr_range_test_staircase": True}
    assert rates("LRRangeTest", 7, **params) == pytest.approx([0.1] * 3 + [0.2] * 3 + [0.3] * 2)


# --- parameter groups -------------------------------------------------------------------------------------------


def last_rates(kind: str, count: int, **params: Any) -> Any:
    schedule = make(kind, adamw(0.5, 0.25), **params)
    list(steps(schedule, count))
    return schedule.get_last_lr()


def test_each_parameter_group_may_have_its_own_rates() -> None:
    params = {"warmup_min_lr": [0.0, 0.2], "warmup_max_lr": [0.1, 0.4], "warmup_type": "linear"}
    assert last_rates("WarmupLR", 1, warmup_num_steps=2, **params) == pytest.approx([0.05, 0.3])
    assert last_rates("WarmupDecayLR", 4, warmup_num_steps=2, total_num_steps=6, **params) == pytest.approx([0.05, 0.3])
    cycle = {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": [0.3, 0.6], "cycle_first_step_size": 2}
    assert last_rates("OneCycle", 1, **cycle) == pytest.approx([0.2, 0.4])
    assert last_rates("LRRangeTest", 2, lr_range_test_step_size=2, lr_range_test_min_lr=[0.1, 0.3]) == [0.2, 0.6]


def test_one_rate_holds_for_all_parameter_groups() -> None:
    assert last_rates("WarmupLR", 3, warmup_max_lr=0.1, warmup_num_steps=2) == [0.1, 0.1]


def test_ratios_are_shares_of_each_groups_own_rate() -> None:
    params = {"total_num_steps": 4, "warmup_num_steps": 0, "cos_min_ratio": 0.0}
    assert last_rates("WarmupCosineLR", 2, **params) == pytest.approx([0.25, 0.125])


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "key", "value", "said"),
    [
        ("WarmupLR", "warmup_min_lr", -0.1, "expected at least 0, found -0.1"),
        ("WarmupLR", "warmup_min_lr", None, "expected a number, found null; remove it for the scheduler's default"),
        ("WarmupLR", "warmup_max_lr", "high", 'expected a number, found "high"'),
        ("WarmupLR", "warmup_max_lr", math.inf, "expected a finite number, found Infinity"),
        (
            "WarmupLR",
            "warmup_max_lr",
            [0.1, 0.2],
            "expected one number, or one for each of 1 parameter groups, found [0.1, 0.2]",
        ),
        ("WarmupLR", "warmup_max_lr", ["a"], 'expected a number, found ["a"]'),
        ("WarmupLR", "warmup_num_steps", -1, "expected at least 0, found -1"),
        ("WarmupLR", "warmup_num_steps", 1.5, "expected a whole number, found 1.5"),
        ("WarmupLR", "warmup_num_steps", True, "expected a whole number, found true"),
        ("WarmupLR", "warmup_num_steps", math.inf, "expected a whole number, found Infinity"),
        ("WarmupLR", "warmup_type", "cosine", 'expected "log" or "linear", found "cosine"'),
        ("WarmupLR", "last_batch_iteration", -2, "expected at least -1, found -2"),
        ("WarmupDecayLR", "total_num_steps", 0, "expected at least 1, found 0"),
        ("WarmupDecayLR", "total_num_steps", 3, "3 contradicts warmup_num_steps 4, which is more"),
        ("WarmupCosineLR", "total_num_steps", 3, "3 contradicts warmup_num_steps 4, which is more"),
        ("WarmupCosineLR", "warmup_min_ratio", [0.1], "expected a number, found [0.1]"),
        ("WarmupCosineLR", "cos_min_ratio", -1, "expected at least 0, found -1"),
        ("OneCycle", "cycle_first_step_size", 0, "expected at least 1, found 0"),
        ("OneCycle", "cycle_second_step_size", 0, "expected at least 1, found 0"),
        ("OneCycle", "cycle_first_stair_count", -1, "expected at least 0, found -1"),
        ("OneCycle", "cycle_momentum", 2, "expected true or false, found 2"),
        ("OneCycle", "cycle_max_mom", 1.0, "expected less than 1, found 1.0"),
        ("OneCycle", "decay_step_size", 2.5, "expected a whole number, found 2.5"),
        ("LRRangeTest", "lr_range_test_step_size", 0, "expected at least 1, found 0"),
        ("LRRangeTest", "lr_range_test_staircase", "stairs", 'expected true or false, found "stairs"'),
    ],
)
def test_a_bad_argument_is_named_with_what_was_expected(kind: str, key: str, value: Any, said: str) -> None:
    assert refusal(kind, **{**EXAMPLES[kind], key: value}) == f"scheduler.params.{key}: {said}"


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *[("WarmupDecayLR", "total_num_steps"), ("WarmupCosineLR", "total_num_steps")],
        *[("OneCycle", "cycle_min_lr"), ("OneCycle", "cycle_max_lr")],
    ],
)
def test_an_argument_without_default_must_be_given(kind: str, key: str) -> None:
    params = {name: value for name, value in EXAMPLES[kind].items() if name != key}
    assert refusal(kind, **params) == f"scheduler.params.{key}: missing; {kind} has no default for it"


@every_kind
def test_an_unknown_argument_is_refused_with_the_known_ones(kind: str) -> None:
    text = refusal(kind, **EXAMPLES[kind], optimizer=1)
    assert text.startswith(f"scheduler.params.optimizer: {kind} does not take it; it takes ")
    assert set(EXAMPLES[kind]) | {"last_batch_iteration"} <= set(text.partition("it takes ")[2].split(", "))


def test_a_whole_float_is_a_number_of_steps() -> None:
    assert rates("WarmupLR", 5, warmup_num_steps=5.0) == rates("WarmupLR", 5, warmup_num_steps=5)


def test_a_schedule_comes_from_a_file_with_what_it_leaves_open() -> None:
    params = {"warmup_num_steps": 4, "warmup_max_lr": "auto"}
    block = load({"scheduler": {"type": "warmuplr", "params": params}}).scheduler
    assert block is not None
    schedule = by_name(block, adamw())
    list(steps(schedule, 4))
    assert schedule.get_last_lr() == [0.5]  # the group's own
