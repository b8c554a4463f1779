"""Tests import no tests: what they share is in `tests/support`, and every folder is explained in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
MODULES = sorted(TESTS.rglob("*.py"))
FOLDERS = sorted({path.relative_to(TESTS).parts[0] for path in MODULES if path.parent != TESTS})
PROGRAMS = {
    "campaigns",
    "programs",
    "what_may_i_do",
    "plan",
}  # run by `python -m`, and split into modules as programs are


def imported(path: Path) -> set[str]:
    """Return the dotted names that a module imports, at its top or in a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def is_test(path: Path) -> bool:
    return path.name.startswith("test_")


@pytest.mark.slow
def test_no_module_imports_a_test() -> None:
    tests = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES if is_test(path)}
    found = {
        f"{path.relative_to(ROOT)} imports {test}"
        for path in MODULES
        for name in imported(path)
        for test in (name, name.rpartition(".")[0])
        if test in tests
    }
    assert sorted(found) == []


def test_what_tests_share_is_in_support() -> None:
    own = {"__init__.py", "conftest.py", "make.py"}  # `deepspeed/make.py` made the files beside it, by hand
    others = [path for path in MODULES if not is_test(path) and path.name not in own]
    homes = {path.relative_to(TESTS).parts[0] for path in others}
    assert homes == PROGRAMS | {"support"}
    assert not [path.name for path in (TESTS / "support").rglob("test_*.py")]


def test_tests_reach_into_engines_in_one_place() -> None:
    """What is renamed in the engine is then renamed once here, too."""
    inside = re.compile(r"\b(?:engine|other)\._[a-z]\w*")
    found = {
        str(path.relative_to(TESTS)): names
        for path in MODULES
        if path != TESTS / "support" / "internals.py" and (names := inside.findall(path.read_text()))
    }
    assert found == {}


def test_contributors_are_told_what_each_folder_claims() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert [folder for folder in FOLDERS if f"| `tests/{folder}` |" not in page] == []


@pytest.mark.slow
def test_a_check_that_is_fast_runs_no_benchmark() -> None:
    run = [path for path in MODULES if is_test(path) and any(n.startswith("benchmarks") for n in imported(path))]
    assert run
    assert [path.name for path in run if "\npytestmark = pytest.mark.slow\n" not in path.read_text()] == []
