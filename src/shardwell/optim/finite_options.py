"""The check of each step whether the options of its parameter groups are finite: a step with others ruins the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from shardwell.errors import NonFiniteError


def check_finite_options(optimizer: Optimizer, what_was_done: Callable[[], str]) -> None:
    """Raise if a learning rate or another option is not finite, of which the optimizer's default is.

    Only Python's numbers are looked at, so that the host waits for no device. `what_was_done` says what the step has
    updated so far.
    """
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if type(value) is float:
                is_finite = value - value == 0.0
            elif type(value) is tuple:
                is_finite = _all_finite(value)
            else:
                continue
            if not is_finite and (name == "lr" or _all_finite((optimizer.defaults.get(name, value),))):
                words = "the learning rate (lr)" if name == "lr" else name
                raise NonFiniteError(
                    f"{words} of parameter group {number} is {value}, with which the {type(optimizer).__name__} would "
                    f"ruin the model; {what_was_done()}. Check the learning-rate schedule, and what else sets options "
                    "of parameter groups."
                )


def _all_finite(values: Any) -> bool:
    """Return whether numbers are finite, also in tuples; what is no number counts as finite."""
    return all(
        _all_finite(value) if isinstance(value, tuple | list) else not isinstance(value, float) or math.isfinite(value)
        for value in values
    )
