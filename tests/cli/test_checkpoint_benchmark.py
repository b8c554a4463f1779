from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoints
from benchmarks.checkpoints import judged, main, summarise
from benchmarks.measure import command_line
from benchmarks.model import TINY
from tests.support.command import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, preloaded_processes: None) -> dict[str, Any]:
    """One round of stage 3 on two ranks and on the disk, as the command line measures it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # the measuring processes import the benchmarks from here
        patch.setattr(checkpoints, "IN_MEMORY", folder / "missing")
        arguments = ["--size", "tiny", "--rounds", "1", "--only", "shardwell3", "--folder", str(folder)]
        main([*arguments, "--json", str(folder / "result.json")])
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert [path.name for path in folder.iterdir()] == ["result.json"]  # what was saved is gone
    return result


def test_what_is_loaded_is_what_was_saved_and_no_more_is_read(report: dict[str, Any]) -> None:
    assert list(report["summary"]) == ["2 ranks, disk"]
    figures = report["summary"]["2 ranks, disk"]["shardwell3"]
    assert figures["right"]
    assert figures["needed"] == 12 * TINY.num_parameters / 2
    assert figures["needed"] <= figures["own_read"] <= figures["needed"] + 10_000  # random states
    assert figures["bytes"] > 12 * TINY.num_parameters
    assert 0 < figures["stall"] < figures["done_seconds"]
    assert 0 < figures["save_seconds"] <= figures["durable_seconds"]


def test_results_name_no_folder_of_the_machine(report: dict[str, Any], tmp_path: Path) -> None:
    assert report["command"] == "python -m benchmarks.checkpoints --size tiny --rounds 1 --only shardwell3"
    assert str(ROOT) not in json.dumps(report)
    assert str(tmp_path.parent) not in json.dumps(report)


def test_an_engine_that_is_missing_costs_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["--size", "tiny", "--only", "deepspeed3", "--json", "-"]) == 0
    assert "deepspeed3: skipped: deepspeed is not installed" in capsys.readouterr().out


def test_paths_are_left_out_of_the_command() -> None:
    words = ["--folder", "/here", "--ranks", "2,4", "--json=/there", "--rounds", "1"]
    assert command_line("checkpoints", words) == "python -m benchmarks.checkpoints --ranks 2,4 --rounds 1"


def figures(save: float, load: float, right: bool = True) -> dict[str, Any]:
    return {"save_seconds": save, "durable_seconds": save, "load_seconds": load, "stall": 0.1, "right": right}


def raw(ours: list[dict[str, Any]]) -> dict[str, Any]:
    elsewhere = {"load_seconds": 1.0, "own_read": 100, "needed": 100, "right": True}
    peers = {
        "dcp": [{"places": {"memory": figures(2.0, 3.0)}, "elsewhere": {"4": {**elsewhere, "load_seconds": 0.5}}}],
        "deepspeed3": [{"places": {"memory": figures(1.0, 1.0)}, "elsewhere": {"4": {"refused": "no"}}}],
        "shardwell3": [{"places": {"memory": one}, "elsewhere": {"4": elsewhere}} for one in ours],
    }
    return {name: {"error": None, "2": rounds} for name, rounds in peers.items()}


def test_targets_are_ratios_of_medians_to_each_peer() -> None:
    rounds = [figures(0.9, 1.2), figures(9.0, 1.2), figures(0.8, 1.2)]
    verdicts = {one["label"]: (one["ratio"], one["met"]) for one in judged(summarise(raw(rounds)))}
    assert verdicts == {
        "2 ranks, memory: save / dcp": (0.45, True),
        "2 ranks, memory: load / dcp": (pytest.approx(0.4), True),
        "2 ranks, memory: save / deepspeed3": (0.9, True),
        "2 ranks, memory: load / deepspeed3": (1.2, False),
        "2 ranks, memory: stall / own save": (pytest.approx(1 / 9), True),
        "2 ranks, memory: stall / stall of dcp": (1.0, True),
        "2 to 4 ranks: load / dcp": (2.0, False),
        "2 to 4 ranks: read / needed": (1.0, True),
    }


def test_one_wrong_load_meets_no_target() -> None:
    rounds = [figures(0.1, 0.1), figures(0.1, 0.1, right=False), figures(0.1, 0.1)]
    verdicts = judged(summarise(raw(rounds)))
    assert not any(one["met"] for one in verdicts if one["label"].startswith("2 ranks"))
