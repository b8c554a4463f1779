"""The arguments that schedules in a configuration take, and the values that these may have.

The tables repeat the signatures in `optim/lr_schedules.py`, so that a file can be checked without torch. A test
compares both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from shardwell.config.arguments import Problem, Rule, check, integer, or_null, real, yes_or_no


def _rate(value: Any) -> float | list[float]:
    """Return one rate for all parameter groups, or one for each."""
    return [real(item) for item in value] if isinstance(value, list | tuple) else real(value)


def _momentum(value: Any) -> float | list[float]:
    one = partial(real, below=1.0)
    return [one(item) for item in value] if isinstance(value, list | tuple) else one(value)


def _kind_of_warmup(value: Any) -> str:
    if value not in ("log", "linear"):
        raise ValueError('expected "log" or "linear"')
    return str(value)


_some = partial(integer, least=1)
_LAST: dict[str, Rule] = {"last_batch_iteration": partial(integer, least=-1)}
_WARMUP: dict[str, Rule] = {"warmup_num_steps": integer, "warmup_type": _kind_of_warmup, **_LAST}
_FROM_TO: dict[str, Rule] = {"warmup_min_lr": _rate, "warmup_max_lr": or_null(_rate), **_WARMUP}

RULES: dict[str, dict[str, Rule]] = {
    "WarmupLR": _FROM_TO,
    "WarmupDecayLR": {"total_num_steps": _some, **_FROM_TO},
    "WarmupCosineLR": {"total_num_steps": _some, "warmup_min_ratio": real, "cos_min_ratio": real, **_WARMUP},
    "OneCycle": {
        "cycle_min_lr": _rate,
        "cycle_max_lr": _rate,
        "decay_lr_rate": real,
        "cycle_first_step_size": _some,
        "cycle_second_step_size": or_null(_some),
        "cycle_first_stair_count": integer,
        "cycle_second_stair_count": or_null(integer),
        "decay_step_size": integer,
        "cycle_momentum": yes_or_no,
        "cycle_min_mom": _momentum,
        "cycle_max_mom": _momentum,
        "decay_mom_rate": real,
        **_LAST,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": _rate,
        "lr_range_test_step_size": _some,
        "lr_range_test_step_rate": real,
        "lr_range_test_staircase": yes_or_no,
        **_LAST,
    },
}
NEEDED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
_WARMUP_STEPS = 1000  # by default


def checked(kind: str, params: Mapping[str, Any], later: Collection[str] = ()) -> tuple[dict[str, Any], list[Problem]]:
    """Return the arguments in the form that the schedule takes, and the problems; those in `later` come later."""
    clean, problems = check("scheduler", kind, RULES[kind], params)
    for key in NEEDED.get(kind, ()):
        if key not in params and key not in later:
            problems.append((f"scheduler.params.{key}", f"missing; {kind} has no default for it"))
    total, warmup = clean.get("total_num_steps"), clean.get("warmup_num_steps", _WARMUP_STEPS)
    if total is not None and total < warmup and not {"warmup_num_steps", "total_num_steps"} & set(later):
        sentence = f"{total} contradicts warmup_num_steps {warmup}, which is more"
        problems.append(("scheduler.params.total_num_steps", sentence))
    return clean, problems
