"""`.ci/check --fast` runs every function that is not slow, and all cases of those that need no ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.fast import fast_cases, long_files_first, together


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


def test_slow_files_come_first_then_those_of_many_items_in_order() -> None:
    many = [SimpleNamespace(nodeid=f"tests/unit/test_storage.py::test[{n}]", keywords=()) for n in range(30)]
    slow = [SimpleNamespace(nodeid=f"tests/unit/test_fast.py::test[{n}]", keywords=("slow",)) for n in range(2)]
    few = [SimpleNamespace(nodeid=f"tests/unit/test_imports.py::test[{n}]", keywords=()) for n in range(3)]
    assert long_files_first([*few, *many[:9], *slow, *many[9:]]) == [*slow, *many, *few]
