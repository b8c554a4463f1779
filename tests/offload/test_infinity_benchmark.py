"""The benchmark of host and disk: variants train alike, its formulas are what the disk tier moves, and it goes on."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.disk import rewritten_by_threads, rewritten_rate
from benchmarks.infinity import against_peer, command_line, main, parse_arguments
from benchmarks.infinity_floor import Place, block_by_block, demands, floor_of, steady_seconds
from benchmarks.infinity_plot import merged
from benchmarks.infinity_variants import SIZES, VARIANTS, disk_bytes_in_all, disk_bytes_of, runs_of
from benchmarks.infinity_worker import measure, variant_of
from shardwell.config import load
from shardwell.errors import ConfigError
from shardwell.offload.disk import AioSettings, DiskTier, aligned
from tests.support.command import ROOT
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow

TINY = SIZES["tiny"]
PARAMETERS = TINY.model.num_parameters
STATE = ("shardwell3:disk", "shardwell3:disk:parameters-on-host")
ON_DISK = ("shardwell3:disk:parameters",)
RATES: dict[str, Any] = {
    "drive": {"mixed": 5.0},
    "bus": {"each_of_both": 4.0},
    "update": {"fp32": 1.0, "8bit": 2.0},
    "compute": {"tiny": {"forward": 1.0, "backward": 3.0, "compute": 4.0}},
}


def parameters_may_rest_on_disk() -> bool:
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "."}}
    try:
        load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    except ConfigError:
        return False
    return True


def spec(name: str, folder: Path, **others: Any) -> dict[str, Any]:
    plain = {"warm_up": 1, "steps": 2, "seconds": 60.0, "own": {}, "clip": False, "device": "cpu"}
    return {**plain, "variant": name, "drive": str(folder), **others}


def measured(names: tuple[str, ...], folder: Path) -> dict[str, Any]:
    with patch.dict(os.environ, SHARDWELL_DEVICE="cpu", SHARDWELL_IO="threads"):
        return {name: measure(variant_of(spec(name, folder)), TINY, spec(name, folder)) for name in names}


@pytest.fixture(scope="module")
def found(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = (*STATE, "shardwell3:host", "shardwell3:disk:clip", *(ON_DISK if parameters_may_rest_on_disk() else ()))
    return dict(ranks.run(1, measured, names, tmp_path_factory.mktemp("drive"))[0])


def test_variants_train_alike_wherever_states_rest(found: dict[str, Any]) -> None:
    host = found["shardwell3:host"]
    assert host["losses"][-1] < host["losses"][0]
    for name, figures in found.items():
        assert len(figures["losses"]) == 3
        tolerance = 2e-3 if VARIANTS[name].clip else 0.0
        assert figures["losses"] == pytest.approx(host["losses"], abs=tolerance), name


@pytest.mark.parametrize("name", [*STATE, "shardwell3:disk:clip", *ON_DISK])
def test_the_disk_tier_moves_what_the_formula_says(found: dict[str, Any], name: str) -> None:
    if name not in found:
        pytest.skip("parameters on disk are not there yet")
    moved = found[name]["disk_bytes"]
    in_advance = found[name]["read_in_advance"]  # in whole sectors
    assert 0 <= moved["formula"] - (moved["counted"] - in_advance) < 0.05 * in_advance
    assert found[name]["demands"]["disk"] == pytest.approx(sum(moved["each"].values()), rel=1e-3)


def test_figures_say_where_states_rest_and_what_was_used(found: dict[str, Any]) -> None:
    on_disk, on_host = found["shardwell3:disk"], found["shardwell3:host"]
    assert on_disk["places"] == [{"parameters": "device", "optimizer": "disk", "numel": PARAMETERS}]
    assert on_disk["bytes"]["disk"]["optimizer"] == pytest.approx(12 * PARAMETERS, rel=1e-3)
    assert on_disk["demands"] == pytest.approx(
        {"updated": PARAMETERS, "down": 2 * PARAMETERS, "up": 2 * PARAMETERS, "disk": 24 * PARAMETERS}, rel=1e-3
    )
    assert on_host["demands"]["disk"] == on_host["usage"]["disk_read"] == on_host["disk_bytes"]["counted"] == 0
    for figures in found.values():
        assert len(figures["step_seconds"]) == 3
        assert 0 < figures["usage"]["update_busy"] <= 1
        assert figures["tokens_per_second"] == pytest.approx(2 * 32 / figures["seconds"])


def test_steps_stop_when_the_time_is_over(ranks: Ranks, tmp_path: Path) -> None:
    figures = ranks.run(1, hurried, tmp_path)[0]
    assert len(figures["step_seconds"]) == 1 + 1  # one to warm up, and one at least that is timed
    assert len(figures["returned_seconds"]) == 1


def hurried(folder: Path) -> dict[str, Any]:
    asked = spec("shardwell3:host", folder, steps=100, seconds=0.0)
    with patch.dict(os.environ, SHARDWELL_DEVICE="cpu"):
        return measure(variant_of(asked), TINY, asked)


def test_bytes_of_a_step_by_configuration() -> None:
    total = {name: sum(disk_bytes_of(VARIANTS[name], 1).values()) for name in VARIANTS}
    assert total["shardwell3:disk"] == total["shardwell3:disk:parameters-on-host"] == 24
    assert disk_bytes_of(VARIANTS["shardwell3:disk:parameters"], 1) == {"read": 12 + 2 + 2, "written": 12}
    assert total["shardwell3:host:parameters"] == 0
    assert total["shardwell3:auto:8bit"] == pytest.approx(28 - 12, rel=0.01)
    assert disk_bytes_in_all(VARIANTS["shardwell3:disk"], 1, steps=3) == 3 * 24 - 8


@pytest.mark.parametrize(
    ("commit", "moments", "asked", "seconds"),
    [
        ("at once", "fp32", {"disk": 2.0}, 4.0),
        ("at once", "fp32", {"disk": 18.0}, 9.0),
        ("at once", "fp32", {"up": 80.0, "down": 4.0}, 20.0),
        ("at once", "8bit", {"updated": 12.0}, 6.0),
        ("after the norm", "fp32", {"disk": 18.0}, 3.0 + 9.0),
        ("after the norm", "fp32", {"disk": 1.0}, 4.0),
    ],
)
def test_the_floor_is_by_its_formula(commit: str, moments: str, asked: dict[str, float], seconds: float) -> None:
    nothing = {"updated": 0.0, "up": 0.0, "down": 0.0, "disk": 0.0}
    figures = {"commit": commit, "moments": moments, "demands": nothing | asked, "kept_up": [1.0, 3.0]}
    assert floor_of(figures, RATES, "tiny")["floor"] == seconds


def test_the_floor_of_a_run_without_a_drive_needs_no_rate_of_one() -> None:
    nothing = {"updated": 0.0, "up": 0.0, "down": 0.0, "disk": 0.0}
    figures = {"commit": "at once", "moments": "fp32", "demands": nothing, "kept_up": []}
    assert floor_of(figures, RATES, "tiny")["floor"] == 4.0


REQUEST = 1 << 18  # bytes, where the benchmark has more


@pytest.mark.parametrize("sizes", [[100, 3 * 4096], [40 * REQUEST + 10], [REQUEST]])
def test_what_the_drive_is_measured_with_stays_as_it_was(
    tmp_path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.disk.REQUEST", REQUEST)
    with DiskTier([tmp_path], AioSettings(engine="python")) as tier:
        extents = [tier.allocate(size) for size in sizes]
        before = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
        for extent, values in zip(extents, before, strict=True):
            memory = aligned(extent.num_bytes)
            memory.copy_(values)
            tier.write(extent, 0, memory).wait()
        assert rewritten_rate(tier, extents, 0.05) > 0
        assert rewritten_by_threads(tier, extents, 0.05) > 0
        for extent, values in zip(extents, before, strict=True):
            memory = aligned(extent.num_bytes)
            tier.read(extent, 0, memory).wait()
            assert memory.equal(values)


def test_demands_follow_the_places() -> None:
    places = [Place("device", "device", 1), Place("device", "host", 10), Place("disk", "disk", 100)]
    asked = demands(places, {"optimizer": 1000, "parameters": 200, "gradients": 50})
    assert asked == {"updated": 110, "down": 220, "up": 4 * 100 + 2 * 10, "disk": 2 * 1000 + 4 * 200 + 2 * 50}


def test_compute_of_many_blocks_is_that_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(workload: Any) -> dict[str, float]:
        return {"forward": 1.0 + workload.model.blocks, "compute": 3.0 + 3 * workload.model.blocks}

    monkeypatch.setattr("benchmarks.infinity_floor.compute_seconds", seconds)
    size = replace(TINY, model=replace(TINY.model, blocks=40))
    assert block_by_block(size, "cpu") == {"forward": 41.0, "compute": 123.0, "backward": 82.0}


def test_the_largest_are_just_larger_than_their_names() -> None:
    assert {name: run.variant for name, run in runs_of("largest", "1b", 60).items()} == {
        "25b": "shardwell3:auto",
        "40b": "shardwell3:auto:8bit",
        "21b": "shardwell3:auto:clip",
    }
    assert 25e9 < SIZES["25b"].model.num_parameters < 25.4e9
    assert 40e9 < SIZES["40b"].model.num_parameters < 40.4e9


def test_a_command_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    here = ("--nvme", str(tmp_path), "--json", str(tmp_path / "x.json"))
    asked = parse_arguments([*here, "--part", "largest", "--clip"])
    assert command_line(asked) == "python -m benchmarks.infinity --part largest --nvme DIRECTORY --clip"


@pytest.mark.parametrize(("moved", "steady"), [(0, 5.0), (100, 10.0), (200, 5.0), (220, 5.0)])
def test_what_moves_behind_the_last_step_counts(moved: int, steady: float) -> None:
    used = {"disk_read": moved * 3 // 4, "disk_written": moved // 4}
    figures = {"seconds": 5.0, "returned_seconds": [5.0, 10.0], "usage": used, "demands": {"disk": 100}}
    assert steady_seconds(figures) == steady


def test_ratios_are_to_the_fastest_run_of_the_peer() -> None:
    speeds = {"shardwell3:disk": 2.0, "deepspeed3:disk": 6.0, "deepspeed3:disk:pipelined": 5.0}
    runs: dict[str, Any] = {name: {"variant": name, "figures": {"seconds": one}} for name, one in speeds.items()}
    runs["shardwell3:host"] = {"variant": "shardwell3:host", "figures": None}
    assert {name: against_peer(name, runs) for name in runs} == {
        "shardwell3:disk": 2.5,
        "deepspeed3:disk": 5 / 6,
        "deepspeed3:disk:pipelined": 1.0,
        "shardwell3:host": None,
    }


def report(part: str, **sizes: float) -> dict[str, Any]:
    runs = {
        name: {
            "size": name,
            "parameters": 1e9 * seconds,
            "error": None,
            "figures": {
                "seconds": seconds,
                "returned_seconds": [seconds],
                "bytes": {"device": {"parameters": 10}, "disk": {"optimizer": 5}},
                "usage": {"disk_read": 5, "disk_written": 5},
                "demands": {"disk": 10},
            },
            "floor": dict.fromkeys(("floor", "compute", "disk", "update", "bus"), seconds / 2),
        }
        for name, seconds in sizes.items()
    }
    return {"part": part, "runs": {**runs, "failed": {"error": "failed: out of memory"}}}


def test_a_plot_is_of_several_files(tmp_path: Path) -> None:
    reports = [report("growth", b=4.0, a=2.0), report("disk1b", other=3.0), report("largest", c=8.0, b=5.0)]
    assert [(run["size"], run["figures"]["seconds"]) for run in merged(reports)] == [("a", 2.0), ("b", 5.0), ("c", 8.0)]
    files = [tmp_path / f"{place}.json" for place in range(3)]
    for file, one in zip(files, reports, strict=True):
        file.write_text(json.dumps(one))
    main(["--plot", *map(str, files), "--png", str(tmp_path / "growth.png")])
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_leaves_figures_and_nothing_on_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded_processes: None
) -> None:
    monkeypatch.chdir(ROOT)  # the measuring processes import the benchmarks from here
    drive, path = tmp_path / "drive", tmp_path / "infinity.json"
    drive.mkdir()
    cpu = ("--nvme", str(drive), "--size", "tiny", "--device", "cpu", "--json", str(path))
    main([*cpu, "--part", "growth", "--only", "1.3b,25b", "--rest", "shardwell3:disk", "--own", '{"moments": "8bit"}'])
    found = json.loads(path.read_text())
    assert [run["error"] for run in found["runs"].values()] == [None, None]
    for run in found["runs"].values():
        assert run["figures"]["moments"] == "8bit"
        assert run["steady"] >= run["figures"]["seconds"]
        assert run["/floor"] == pytest.approx(run["steady"] / run["floor"]["floor"])
        asked = run["figures"]["demands"]["disk"]
        assert run["floor"]["disk"] == pytest.approx(asked / mean(run["figures"]["kept_up"]))
        assert run["figures"]["kept_up"] == [max(ways.values()) for ways in run["figures"]["kept_up_by"]]
        assert [ways.keys() for ways in run["figures"]["kept_up_by"]] == [{"tier", "threads"}] * 2
    assert str(tmp_path) not in path.read_text()
    assert list(drive.iterdir()) == []


def test_nothing_is_started_when_the_time_is_over(tmp_path: Path) -> None:
    path = tmp_path / "infinity.json"
    only = "shardwell3:disk,deepspeed3:disk"
    asked = ("--size", "tiny", "--device", "cpu", "--only", only, "--budget", "1", "--json", str(path))
    main(["--nvme", str(tmp_path), *asked])
    found = json.loads(path.read_text())
    over = "stopped: 1 s were over before this turn"
    assert found["runs"]["deepspeed3:disk"]["error"] in (over, VARIANTS["deepspeed3:disk"].missing())
    assert found["rates"]["error"] == found["runs"]["shardwell3:disk"]["error"] == over
