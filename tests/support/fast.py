"""What `.ci/check --fast` runs: nothing slow, and one case of each test in ranks; and which files run together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = r"^\s*(import|from) (transformers|peft|trl|lightning)|importorskip\(\"(transformers|peft|trl|lightning)"
_THEIR_SUPPORT = (
    r"tests\.support(\.| import )"
    r"(zoo|trainer_scripts|lightning_runs|sequence_models|expert_models|mixture_legs)"
)

_WEIGHT_OF_SLOW = 15  # a slow case takes as long as so many others


def fast_cases(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items without `slow`; of a function in ranks, the last case: mostly stage 3 and most options."""
    quick = [item for item in items if "slow" not in item.keywords]
    last = {item.nodeid.partition("[")[0]: item for item in quick}
    return [item for item in quick if not _is_in_ranks(item) or item is last[item.nodeid.partition("[")[0]]]


def long_files_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items with the files first that take longest, so that no worker ends with a long one alone.

    Files that have something slow come before all others: one case of them may take a minute.
    """
    weights, long = Counter[str](), set[str]()
    for item in items:
        weights[_file_of(item)] += _WEIGHT_OF_SLOW if "slow" in item.keywords else 1
        if "slow" in item.keywords:
            long.add(_file_of(item))
    return sorted(items, key=lambda item: (_file_of(item) not in long, -weights[_file_of(item)]))


@cache
def together(file: str) -> str:
    """Return the name of the files that one worker runs with this one: those of libraries that take long to import.

    Each rank of a worker imports them, and so does a server that forks scripts of theirs.
    """
    text = (_ROOT / file).read_text()
    return "libraries" if re.search(f"{_LIBRARIES}|{_THEIR_SUPPORT}", text, re.MULTILINE) else file


def _file_of(item: pytest.Item) -> str:
    return together(item.nodeid.partition("::")[0])


def _is_in_ranks(item: pytest.Item) -> bool:
    return "ranks" in getattr(item, "fixturenames", ())
