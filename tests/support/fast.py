"""What `.ci/check --fast` runs: nothing slow, and one case of each test in ranks; and in which order files run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def fast_cases(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items without `slow`; of a function in ranks, the last case: mostly stage 3 and most options."""
    quick = [item for item in items if "slow" not in item.keywords]
    last = {item.nodeid.partition("[")[0]: item for item in quick}
    return [item for item in quick if not _is_in_ranks(item) or item is last[item.nodeid.partition("[")[0]]]


def long_files_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items with the files first that have something slow, so that no worker ends with a long one alone."""
    long = {item.path for item in items if "slow" in item.keywords}
    return sorted(items, key=lambda item: item.path not in long)


def _is_in_ranks(item: pytest.Item) -> bool:
    return "ranks" in getattr(item, "fixturenames", ())
