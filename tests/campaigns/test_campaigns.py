"""The campaigns, for as long as a test may take. By hand they run longer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(name: str, folder: Path, count: int) -> dict[str, Any]:
    file = folder / "found.json"
    command = [sys.executable, "-m", f"tests.campaigns.{name}", "--count", str(count), "--seed", "20"]
    subprocess.run([*command, "--minutes", "1", "--json", str(file)], capture_output=True, timeout=180, check=False)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_mutated_configuration_works_or_is_refused_by_a_sentence(tmp_path: Path) -> None:
    found = run("configurations", tmp_path, 200)
    assert found["bad"] == []
    assert found["outcomes"]["works"] > 0
    assert found["outcomes"]["refused"] > 0


def test_a_rank_that_differs_is_named_and_one_that_honestly_differs_trains(tmp_path: Path) -> None:
    found = run("ranks_that_differ", tmp_path, 12)
    assert found["bad"] == []
    assert found["outcomes"]["named"] > 0
