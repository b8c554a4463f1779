from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overheads import main
from tests.support.command import ROOT

pytestmark = pytest.mark.slow

SMALL = ("--small", "--device", "cpu", "--only", "lora")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, preloaded_processes: None) -> dict[str, Any]:
    """Two variants of the LoRA part, as the command line measures them."""
    path = tmp_path_factory.mktemp("overheads") / "overheads.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # the measuring processes import the benchmarks from here
        patch.setenv("SHARDWELL_DEVICE", "cpu")
        main([*SMALL, "--match", "fsdp2-bf16:checkpointed,shardwell3-gathered:checkpointed", "--out", str(path)])
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_every_variant_of_the_part_has_figures(report: dict[str, Any]) -> None:
    assert [entry["error"] for entry in report["raw"].values()] == [None, None]
    assert all(len(one["all_seconds"]) == 2 for entry in report["raw"].values() for one in entry["rounds"])


def test_lora_trains_alike_in_both_engines(report: dict[str, Any]) -> None:
    (row,) = report["ratios"]
    assert row["losses_agree"]
    first, *_, last = report["raw"][row["variant"]]["rounds"][0]["losses"]
    assert last < first


def test_results_name_no_folder_of_the_machine(report: dict[str, Any], tmp_path: Path) -> None:
    text = json.dumps(report)
    assert str(ROOT) not in text
    assert str(tmp_path.parent) not in text


def test_a_variant_that_fails_is_recorded_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "overheads.json"
    assert main([*SMALL, "--match", "fsdp2-bf16", "--limit", "0.01", "--out", str(path)]) == 0
    errors = [entry["error"] for entry in json.loads(path.read_text())["raw"].values()]
    assert errors == ["failed: no result within 0 s"] * 2


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "speed"])
    assert "choose from lora, compile, fp16" in capsys.readouterr().err
