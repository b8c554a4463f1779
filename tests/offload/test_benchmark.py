"""The benchmark of offload: it runs, tells what failed, and its arithmetic is what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.gpu import interleave, summarise
from benchmarks.launch import RunFailedError
from benchmarks.offload import main, ratios
from benchmarks.offload_floor import floor_of
from benchmarks.offload_timeline import MARKER, draw, rows_of
from benchmarks.offload_variants import VARIANTS
from tests.support.command import ROOT

pytestmark = pytest.mark.slow

TINY = ("--size", "tiny", "--device", "cpu", "--steps", "2")
FLOOR = {"forward": 1.0, "backward": 3.0, "compute": 4.0, "update": {"fp32": 5.0, "8bit": 2.0}, "bus": 6.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, preloaded_processes: None) -> Path:
    """What a run of two variants and a timeline leaves."""
    folder = tmp_path_factory.mktemp("offload")
    only = ("--only", "shardwell2:shadow:always-clips,fsdp2:clip")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # the measuring processes import the benchmarks from here
        main([*TINY, *only, "--json", str(folder / "offload.json"), "--timeline", str(folder / "steps.png")])
    return folder


def test_variants_train_alike_and_have_figures(folder: Path) -> None:
    found = json.loads((folder / "offload.json").read_text())["sizes"]["tiny"]
    assert [entry["error"] for entry in found["raw"].values()] == [None, None]
    ours, peer = found["summary"].values()
    assert ours["clip_rate"] == peer["clip_rate"] == 1.0
    assert ours["loss"] == pytest.approx(peer["loss"], abs=2e-3)
    assert ours["/FSDP2"] == pytest.approx(ours["tflops"] / peer["tflops"])
    floor = found["floor"]
    assert ours["floor"] == pytest.approx(floor["backward"] + max(floor["forward"], floor["update"]["fp32"]))


def test_a_timeline_has_updates_inside_the_step(folder: Path) -> None:
    profiles = json.loads((folder / "steps.json").read_text())
    assert (folder / "steps.png").read_bytes().startswith(b"\x89PNG")
    assert list(profiles) == ["shardwell2:at-once", "shardwell2:after-norm:clip"]
    for found in profiles.values():
        ends = [end for spans in found["spans_ms"].values() for _, end in spans]
        assert max(ends) <= found["step_ms"]
        assert found["busy"]["compute"] > 0
    at_once = profiles["shardwell2:at-once"]  # after the norm, all of so small a model may come after the step
    assert at_once["spans_ms"]["update"]
    assert at_once["busy"]["update"] > 0


def test_results_name_no_folder_of_the_machine(folder: Path) -> None:
    raw = json.loads((folder / "offload.json").read_text())["sizes"]
    assert str(ROOT) not in json.dumps(raw)


def test_a_variant_that_fails_is_recorded_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "offload.json"
    only = ("--only", "shardwell2:at-once,fsdp2")
    assert main([*TINY, *only, "--limit", "0.01", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["sizes"]["tiny"]
    errors = [found["floor"]["error"], *(entry["error"] for entry in found["raw"].values())]
    assert errors == ["failed: no result within 0 s"] * 3
    assert found["summary"] == {}


def test_nothing_is_started_when_the_time_is_over(tmp_path: Path) -> None:
    path = tmp_path / "offload.json"
    assert main([*TINY, "--only", "fsdp2", "--budget", "1", "--json", str(path)]) == 0
    entry = json.loads(path.read_text())["sizes"]["tiny"]["raw"]["fsdp2"]
    assert entry["error"] == "stopped: 1 s were over before this turn"


def test_figures_of_one_round_stay_when_the_next_fails() -> None:
    turns: list[str] = []

    def measure(name: str) -> dict[str, Any]:
        turns.append(name)
        if turns.count("first") == 2:
            raise RunFailedError("failed: out of memory")
        memory = dict.fromkeys(("peak_allocated", "peak_reserved", "rest_allocated", "rss_peak"), 7)
        return {"seconds": 2.0, "tflops": 3.0, "losses": [5.0, 4.0], **memory}

    raw = interleave({"first": None, "absent": "skipped: not installed", "second": None}, 2, measure, Console())
    assert turns == ["first", "second", "second", "first"]
    assert {name: entry["error"] for name, entry in raw.items()} == {
        "first": "failed: out of memory",
        "absent": "skipped: not installed",
        "second": None,
    }
    assert {name: figures["seconds"] for name, figures in summarise(raw).items()} == {"first": 2.0, "second": 2.0}


def test_an_unknown_variant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*TINY, "--only", "shardwell2:soon"])
    assert "unknown 'shardwell2:soon'; choose from shardwell2-device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("shardwell2-device", 4.0),
        ("shardwell2:at-once", 6.0),
        ("shardwell2:shadow:never-clips", 6.0),
        ("shardwell2:after-norm:clip", 3.0 + 5.0),
        ("shardwell2:shadow:always-clips", 3.0 + 5.0),
        ("shardwell2:at-once:8bit", 6.0),
        ("shardwell2:at-once:accumulate4", 4 * 4.0),
        ("shardwell2:at-once:ratio-auto", None),
        ("deepspeed2", None),
    ],
)
def test_the_floor_is_by_its_formula(name: str, seconds: float | None) -> None:
    assert floor_of(VARIANTS[name], FLOOR) == seconds


def test_ratios_are_to_the_best_row_that_clips_alike() -> None:
    rows = {"shardwell2-device": 9.0, "shardwell2:at-once": 8.0, "deepspeed2": 2.0, "deepspeed3:parameters": 4.0}
    rows |= {"deepspeed2:clip": 1.0, "fsdp2:clip": 7.0}
    summary: dict[str, Any] = {name: {"tflops": speed, "seconds": 1.0, "floor": 0.8} for name, speed in rows.items()}
    found = ratios("shardwell2:at-once", summary)
    assert found == {"/DeepSpeed": 8 / 4, "/FSDP2": None, "/no offload": 8 / 9, "/floor": 1.25}


def test_spans_of_both_clocks_are_on_one_axis(tmp_path: Path) -> None:
    def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}

    events = [
        event("user_annotation", MARKER, 5_000.0, 10_000.0),
        event("kernel", "gemm", 4_000.0, 3_000.0, stream=7),  # begins before the step
        event("kernel", "gemm", 7_010.0, 990.0, stream=7),  # so near that it is drawn as one
        event("kernel", "cast", 9_000.0, 100.0, stream=20),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 8_000.0, 1_000.0, stream=20),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 14_000.0, 5_000.0, stream=21),  # ends after it
        event("cpu_op", "aten::mm", 5_000.0, 9_000.0),
    ]
    began = 77_000_000
    found = rows_of(events, began, [(began - 9_000, began - 1), (began + 4_000_000, began + 6_000_000)])
    assert found["spans_ms"] == {"compute": [(0, 3)], "down": [(3, 4)], "update": [(4, 6)], "up": [(9, 10)]}
    assert found["busy"] == pytest.approx({"compute": 0.299, "down": 0.1, "update": 0.2, "up": 0.1})
    draw({"a step": found}, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000
