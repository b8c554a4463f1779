"""The names of DeepSpeed's schedules and of their arguments, as options of a command line and as a schedule's block."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE = "lr_range_test_min_lr", "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE = "lr_range_test_step_size", "lr_range_test_staircase"
EDGE_VALUE, MID_VALUE = "edge_value", "mid_value"
CYCLE_FIRST_STEP_SIZE, CYCLE_FIRST_STAIR_COUNT = "cycle_first_step_size", "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT = "cycle_second_step_size", "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE = "cycle_min_lr", "cycle_max_lr", "decay_lr_rate"
CYCLE_MOMENTUM, CYCLE_MIN_MOM, CYCLE_MAX_MOM = "cycle_momentum", "cycle_min_mom", "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"
WARMUP_MIN_LR, WARMUP_MAX_LR = "warmup_min_lr", "warmup_max_lr"
WARMUP_NUM_STEPS, WARMUP_TYPE = "warmup_num_steps", "warmup_type"
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
WARMUP_MIN_RATIO, COS_MIN_RATIO = "warmup_min_ratio", "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"

# option -> (type, default); None is not passed on, so that the schedule's own default holds
_RANGE: dict[str, tuple[Any, Any]] = {
    LR_RANGE_TEST_MIN_LR: (float, 0.001),
    LR_RANGE_TEST_STEP_RATE: (float, 1.0),
    LR_RANGE_TEST_STEP_SIZE: (int, 1000),
    LR_RANGE_TEST_STAIRCASE: (bool, False),
}
_CYCLE: dict[str, tuple[Any, Any]] = {
    CYCLE_FIRST_STEP_SIZE: (int, 1000),
    CYCLE_FIRST_STAIR_COUNT: (int, None),
    CYCLE_SECOND_STEP_SIZE: (int, None),
    CYCLE_SECOND_STAIR_COUNT: (int, None),
    DECAY_STEP_SIZE: (int, 1000),
    CYCLE_MIN_LR: (float, 0.01),
    CYCLE_MAX_LR: (float, 0.1),
    DECAY_LR_RATE: (float, 0.0),
    CYCLE_MOMENTUM: (bool, False),
    CYCLE_MIN_MOM: (float, 0.8),
    CYCLE_MAX_MOM: (float, 0.9),
    DECAY_MOM_RATE: (float, 0.0),
}
_STEPS: dict[str, tuple[Any, Any]] = {
    WARMUP_NUM_STEPS: (int, 1000),
    WARMUP_TYPE: (str, WARMUP_LOG_RATE),
}
_WARMUP: dict[str, tuple[Any, Any]] = {
    WARMUP_MIN_LR: (float, 0.0),
    WARMUP_MAX_LR: (float, 0.001),
    **_STEPS,
}
_COSINE: dict[str, tuple[Any, Any]] = {
    **_STEPS,
    WARMUP_MIN_RATIO: (float, 0.01),
    COS_MIN_RATIO: (float, 0.01),
}
_OF = {LR_RANGE_TEST: _RANGE, ONE_CYCLE: _CYCLE, WARMUP_COSINE_LR: _COSINE}
_HIGHEST = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of all schedules to a parser, and return it."""
    group = parser.add_argument_group("Learning-rate schedule", "a schedule by name, and its arguments")
    group.add_argument("--lr_schedule", help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    for option, (kind, default) in {**_RANGE, **_CYCLE, **_WARMUP, **_COSINE}.items():
        if kind is bool:
            group.add_argument(f"--{option}", action="store_true", default=default)
        else:
            group.add_argument(f"--{option}", type=kind, default=default)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of schedules on the command line, and the words that are none."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _copy(options: Mapping[str, Any], args: Any, params: dict[str, Any]) -> None:
    params.update({name: value for name in options if (value := getattr(args, name, None)) is not None})


def override_lr_range_test_params(args: Any, params: dict[str, Any]) -> None:
    """Copy the options of LRRangeTest into the arguments of a schedule."""
    _copy(_RANGE, args, params)


def override_1cycle_params(args: Any, params: dict[str, Any]) -> None:
    """Copy the options of OneCycle into the arguments of a schedule."""
    _copy(_CYCLE, args, params)


def override_warmupLR_params(args: Any, params: dict[str, Any]) -> None:  # noqa: N802 - DeepSpeed's name
    """Copy the options of WarmupLR into the arguments of a schedule."""
    _copy(_WARMUP, args, params)


def override_warmupCosineLR_params(args: Any, params: dict[str, Any]) -> None:  # noqa: N802 - DeepSpeed's name
    """Copy the options of WarmupCosineLR into the arguments of a schedule."""
    _copy(_COSINE, args, params)


def override_params(args: Any, params: dict[str, Any]) -> None:
    """Copy the options of all schedules into the arguments of a schedule."""
    _copy({**_RANGE, **_CYCLE, **_WARMUP, **_COSINE}, args, params)


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Return the block `scheduler` that parsed options describe, or None and the reason why there is none."""
    kind = getattr(args, LR_SCHEDULE, None)
    if kind is None:
        return None, f"--{LR_SCHEDULE} is not on the command line"
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not a supported schedule; supported are {', '.join(VALID_LR_SCHEDULES)}"
    params: dict[str, Any] = {}
    _copy(_OF.get(kind, _WARMUP), args, params)
    return {"type": kind, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the rate that a block `scheduler` names and "", or None and the reason why it names none."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"the block of the schedule has no {key}"
    kind = config["type"]
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not a supported schedule; supported are {', '.join(VALID_LR_SCHEDULES)}"
    if kind == WARMUP_COSINE_LR:
        return None, f"{kind} takes shares of the optimizer's own rate, and names no rate itself"
    rate = config["params"].get(_HIGHEST.get(kind, WARMUP_MAX_LR))
    return rate, "" if rate is not None else f"the arguments of {kind} name no rate"
