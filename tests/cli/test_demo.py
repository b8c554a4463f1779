from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwell.cli.demo_command import _draw
from tests.support.command import shardwell

pytestmark = pytest.mark.slow

Run = tuple[subprocess.CompletedProcess[str], Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("demo")
    return shardwell("demo", "--steps", "6", "--out", "out", "--trace", cwd=folder), folder / "out"


@pytest.fixture(scope="module")
def numbers(run: Run) -> dict[str, Any]:
    assert run[0].returncode == 0, run[0].stdout + run[0].stderr
    result: dict[str, Any] = json.loads((run[1] / "demo.json").read_text())
    return result


def test_all_stages_train_alike(numbers: dict[str, Any]) -> None:
    verdict = numbers["verdict"]
    assert verdict["agrees"]
    assert verdict["loss_difference"] <= 1e-3


def test_the_loss_falls(numbers: dict[str, Any]) -> None:
    assert all(stage["losses"][-1] < stage["losses"][0] - 0.5 for stage in numbers["stages"])


def test_states_at_rest_follow_the_formula(numbers: dict[str, Any]) -> None:
    for stage in numbers["stages"]:
        found = stage["at_rest"]["parameters"] + stage["at_rest"]["gradients"] + stage["at_rest"]["optimizer"]
        assert found == pytest.approx(stage["formula"]["rest"], rel=2e-3)


def test_stage_three_rests_at_half_of_stage_zero_on_two_ranks(numbers: dict[str, Any]) -> None:
    rest = [sum(stage["at_rest"].values()) for stage in numbers["stages"]]
    assert rest[3] == pytest.approx(rest[0] / 2, rel=2e-3)


def test_averaged_gradients_follow_the_formula(numbers: dict[str, Any]) -> None:
    for stage in numbers["stages"]:
        assert stage["before_update"]["gradients"] == pytest.approx(stage["formula"]["gradients"], rel=2e-3)


def test_traffic_follows_the_formula(numbers: dict[str, Any]) -> None:
    for stage in numbers["stages"]:
        assert stage["received_per_step"]["payload"] == pytest.approx(stage["formula"]["received"], rel=2e-3)


def test_what_rank_0_says_at_the_start_is_printed(run: Run) -> None:
    assert "at the start, rank 0 says of stage 3:" in run[0].stdout
    assert "- on each rank: parameters " in run[0].stdout


def test_the_verdict_is_printed(run: Run) -> None:
    assert "tolerance 1e-03): pass" in " ".join(run[0].stdout.split())


def test_the_trace_shows_gathers_at_stage_three_alone(numbers: dict[str, Any]) -> None:
    gathering = ["G0" in stage["trace"].split() for stage in numbers["stages"]]
    assert gathering == [False, False, False, True]


def test_the_picture_is_a_png_and_its_place_is_printed(run: Run, numbers: dict[str, Any]) -> None:
    assert (run[1] / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "out/demo.png" in run[0].stdout


def test_without_matplotlib_the_demo_says_what_the_picture_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'shardwell[demo]'" in _draw(tmp_path / "demo.png", [], 2, False)
    assert not list(tmp_path.iterdir())


def test_a_stage_that_does_not_exist_is_one_clear_line() -> None:
    result = shardwell("demo", "--stages", "0,4")
    assert result.returncode == 2
    assert result.stderr == "error: --stages 0,4: expected some of 0,1,2,3, separated by commas, each once\n"


def test_layouts_of_three_axes_train_alike(tmp_path: Path) -> None:
    result = shardwell("demo", "--3d", "--ranks", "4", "--steps", "2", "--out", "out", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "out" / "demo-3d.json").read_text())
    assert found["agrees"]
    assert [one["received"]["tensor"] > 0 for one in found["layouts"]] == [False, True, False, True]
    assert [one["received"]["pipe"] > 0 for one in found["layouts"]] == [False, False, True, True]
