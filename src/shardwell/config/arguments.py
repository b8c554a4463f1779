"""Rules for the arguments of optimizers and schedules in a configuration; a check reports all problems.

A rule returns the value in the form that the optimizer or schedule takes, or raises a ValueError that says what was
expected.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from shardwell.config.field_types import LARGEST, flag, number

Rule = Callable[[Any], Any]
Problem = tuple[str, str]  # key, sentence

_MOST_NAMES = 10


def finite(value: Any) -> float:
    found = number(value)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError("expected a number")
    try:
        if not math.isfinite(found):
            raise OverflowError
        return float(found)
    except OverflowError:
        raise ValueError("expected a finite number") from None


def real(value: Any, below: float = math.inf) -> float:
    found = finite(value)
    if found < 0:
        raise ValueError("expected at least 0")
    if found >= below:
        raise ValueError(f"expected less than {below:g}")
    return found


def share(value: Any) -> float:
    found = finite(value)
    if not 0 <= found <= 1:
        raise ValueError("expected a number from 0 to 1")
    return found


def integer(value: Any, least: int = 0) -> int:
    """Return an integer; as in the rest of the configuration, 1e3 is one."""
    found = number(value)
    if isinstance(found, bool) or not isinstance(found, int | float) or found != found // 1:
        raise ValueError("expected a whole number")
    if found < least:
        raise ValueError(f"expected at least {least}")
    if found > LARGEST:
        raise ValueError("expected a whole number below 2**63")
    return int(found)


def yes_or_no(value: Any) -> bool:
    found = flag(value)
    if not isinstance(found, bool):
        raise ValueError("expected true or false")
    return found


def numbers(value: Any, length: int) -> list[float]:
    if not isinstance(value, list | tuple) or len(value) != length:
        raise ValueError(f"expected a list of {length} numbers")
    return [finite(item) for item in value]


def or_null(rule: Rule) -> Rule:
    """Return the rule of an argument that may be null, too."""
    return lambda value: None if value is None else rule(value)


def check(
    block: str, name: str, rules: Mapping[str, Rule], params: Mapping[str, Any], known: Mapping[str, Rule] | None = None
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the arguments in the form that `name` takes, and the problems. Messages suggest names of `known` only."""
    known = known or rules
    clean: dict[str, Any] = {}
    problems: list[Problem] = []
    unknown = [key for key in params if key not in rules]
    for key, value in params.items():
        if key in rules:
            try:
                clean[key] = rules[key](value)
            except ValueError as error:
                remedy = f"; remove it for the {block}'s default" if value is None else ""
                problems.append((f"{block}.params.{key}", f"{error}, found {show(value)}{remedy}"))
    for key in unknown[:_MOST_NAMES]:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(known))}"
        problems.append((f"{block}.params.{key}", f"{name} does not take it; {hint}"))
    if len(unknown) > _MOST_NAMES:
        problems.append((f"{block}.params", f"{name} does not take {len(unknown) - _MOST_NAMES} more"))
    return clean, problems


def show(value: Any) -> str:
    words = json.dumps(value, default=str)
    return words if len(words) <= 80 else f"{words[:80]}..."
