"""The campaigns, for as long as a test may take. By hand they run longer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns import page
from tests.campaigns.result import Result, command_line
from tests.support.command import environment
from tests.support.patience import HANG

pytestmark = pytest.mark.slow


def run(name: str, folder: Path, count: int) -> dict[str, Any]:
    file = folder / "found.json"
    command = [sys.executable, "-m", f"tests.campaigns.{name}", "--count", str(count), "--seed", "20"]
    command += ["--minutes", "9", "--json", str(file)]
    subprocess.run(command, env=environment(root=True), capture_output=True, timeout=HANG, check=False)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_mutated_configuration_works_or_is_refused_by_a_sentence(tmp_path: Path) -> None:
    found = run("configurations", tmp_path, 100)
    assert found["bad"] == []
    assert found["outcomes"]["works"] > 0
    assert found["outcomes"]["refused"] > 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler to build the library of faults with")
def test_a_fault_of_a_file_is_told_or_changes_nothing(tmp_path: Path) -> None:
    found = run("io_faults", tmp_path, 14)
    assert found["bad"] == []
    assert found["outcomes"]["told"] > 0
    assert found["outcomes"]["unharmed"] > 0


def test_a_rank_that_differs_is_named_and_one_that_honestly_differs_trains(tmp_path: Path) -> None:
    found = run("ranks_that_differ", tmp_path, 8)
    assert found["bad"] == []
    assert found["outcomes"]["named"] > 0


def test_a_fault_at_an_operation_of_a_pipeline_is_told_and_a_restart_resumes(tmp_path: Path) -> None:
    found = run("stage_faults", tmp_path, 2)
    assert found["bad"] == []
    assert found["tried"] == 2


def test_a_job_trains_within_its_limit_of_memory_or_is_refused(tmp_path: Path) -> None:
    found = run("memory_limits", tmp_path, 2)
    assert found["bad"] == []
    assert found["tried"] == 2


def test_forms_of_random_models_are_what_an_engine_takes(tmp_path: Path) -> None:
    found = run("forms", tmp_path, 4)
    assert found["bad"] == []
    assert found["outcomes"] == {"the same to the byte": 4}


def test_several_runs_of_a_campaign_count_together() -> None:
    runs = []
    for seed, problem in enumerate(("", "wrong")):
        one = Result("kills")
        one.count("in training", problem)
        one.took("the end", 3.0 + seed)
        runs.append(one.to_dict(f"run {seed}"))
    found = page.together(runs)
    assert (found["tried"], found["outcomes"], found["bad"]) == (2, {"in training": 2}, ["wrong"])
    assert (found["slowest"], found["command"]) == ({"the end": 4.0}, "run 0; run 1")


def test_campaigns_beside_each_other_count_as_one(tmp_path: Path, preloaded_processes: None) -> None:
    file = tmp_path / "found.json"
    assert main(["--count", "5", "--jobs", "2", "--json", str(file)]) == 1
    found = json.loads(file.read_text())
    assert (found["tried"], found["outcomes"]) == (5, {"fine": 3, "wrong": 2})
    assert found["bad"] == ["2 is even", "2 is even"]
    assert found["slowest"] == {"a case": 3.0}


def test_the_page_is_written_from_what_is_kept() -> None:
    kept = json.loads(page.KEPT.read_text())
    assert {result["campaign"] for result in kept["results"]} <= set(page.WORDS)
    assert page.written(page.PAGE.read_text(), kept) == page.PAGE.read_text()


def evens(count: int, seed: int, seconds: float) -> Result:
    """A campaign to which even numbers are wrong."""
    result = Result("evens")
    for number in range(1, count + 1):
        result.count("wrong" if number % 2 == 0 else "fine", "2 is even" if number % 2 == 0 else "")
        result.took("a case", number)
    return result


def main(arguments: list[str] | None = None) -> int:
    return command_line(evens, "tests.campaigns.test_campaigns", None, arguments)


if __name__ == "__main__":
    sys.exit(main())
