"""Few cases of many: those in which every two choices that go together still meet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import combinations
from typing import Any, TypeVar

Case = TypeVar("Case")


def covering(cases: Sequence[Case], *together: tuple[str, ...]) -> list[Case]:
    """Return few of the cases (values of a dataclass) that have every pair of its fields' values that some case has.

    For each tuple of names in `together`, all combinations of these fields' values are kept as well.
    """
    names = [field.name for field in fields(cases[0])]  # type: ignore[arg-type]
    groups = [*combinations(names, 2), *together]
    missing = {one for case in cases for one in _met(case, groups)}
    chosen: list[Case] = []
    while missing:
        best = max(cases, key=lambda case: len(missing.intersection(_met(case, groups))))  # the first of the best
        chosen.append(best)
        missing.difference_update(_met(best, groups))
    return [case for case in cases if case in chosen]


def _met(case: Any, groups: Iterable[tuple[str, ...]]) -> list[tuple[tuple[str, ...], tuple[Any, ...]]]:
    return [(group, tuple(getattr(case, name) for name in group)) for group in groups]
