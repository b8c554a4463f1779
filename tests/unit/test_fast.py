"""`.ci/check --fast` runs every function that is not slow, and all cases of those that need no ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.fast import fast_cases, together


def cases(name: str, num: int, keywords: tuple[str, ...] = (), fixtures: tuple[str, ...] = ("ranks",)) -> list[Any]:
    names = [f"tests/file.py::{name}[{number}]" for number in range(num)]
    return [SimpleNamespace(nodeid=one, keywords=keywords, fixturenames=fixtures) for one in names]


def test_one_case_of_each_function_in_ranks_remains() -> None:
    first, second = cases("first", 3), cases("second", 2)
    assert fast_cases([*first, *second]) == [first[-1], second[-1]]


def test_what_is_slow_goes_and_what_needs_no_ranks_stays() -> None:
    slow, alone = cases("slow", 3, keywords=("slow",)), cases("alone", 3, fixtures=("tmp_path",))
    assert fast_cases([*slow, *alone]) == alone


def test_files_of_libraries_that_take_long_to_import_are_run_by_one_worker() -> None:
    assert together("tests/models/test_lora.py") == together("tests/clients/test_trl.py") == "libraries"
    assert together("tests/unit/test_fast.py") == "tests/unit/test_fast.py"
