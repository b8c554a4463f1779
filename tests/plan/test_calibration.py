"""Files of `shardwell calibrate`: what was written is read, what is no such file is refused, plans use what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwell.cli.plan_speeds import cost_of, parse_count, with_speeds
from shardwell.errors import ConfigError
from shardwell.plan import SimulatedMachine, SimulatedRanks
from shardwell.plan.calibration import Calibration, MeasuredFigure, read_calibration
from shardwell.plan.devices import gpu, speeds_of
from tests.support.command import shardwell

DAY = "2026-11-18T04:00:00+00:00"
FIGURES = {
    "matmul fp32": MeasuredFigure([(1e6, 1e9), (1e9, 5e10)], "products", DAY),
    "device_memory": MeasuredFigure(1e10, "sums", DAY),
    "host_update": MeasuredFigure(2e10, "AdamW", DAY),
    "inside": MeasuredFigure(1e9, "all-gathers", DAY),
}
MEASURED = Calibration("cpu", False, 2, DAY, FIGURES)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    MEASURED.write(tmp_path / "machine.json")
    assert read_calibration(tmp_path / "machine.json") == MEASURED
    found = json.loads((tmp_path / "machine.json").read_text())
    assert all(one["kind"] == "measured" and one["date"] == DAY and one["how"] for one in found["figures"].values())


def test_measured_figures_take_the_place_of_stated_ones(tmp_path: Path) -> None:
    stated = speeds_of(gpu("h200"))
    found = replace(MEASURED, has_gpus=True).speeds(stated)
    assert (found.host_update, found.inside, found.between) == (2e10, 1e9, stated.between)
    assert found.matmul["fp32"].at(1e9) == pytest.approx(5e10)
    assert found.matmul["fp32"].peak == stated.matmul["fp32"].peak  # MFU is by what the vendor states
    assert found.matmul["bf16"] == stated.matmul["bf16"]
    assert found.origins["host_update"] == f"host update: measured {DAY}: AdamW"
    assert not any("H200 datasheet, fp32" in one for one in found.origins.values())


def test_a_calibration_without_gpus_plans_cpu_ranks(tmp_path: Path) -> None:
    MEASURED.write(tmp_path / "machine.json")
    machine = SimulatedMachine(1e9, ranks=SimulatedRanks(0, 2, 2))
    found = with_speeds(machine, "h100", None, "nvme-gen4", tmp_path / "machine.json")
    assert (found.has_gpus, found.ranks.backend) == (False, "gloo")
    assert found.speeds is not None
    assert found.speeds.device_memory == 1e10


def changed(**change: Any) -> dict[str, Any]:
    return {**MEASURED.as_dict(), **change}


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object at the top"),
        (json.dumps(changed(format="other")), "is no file of `shardwell calibrate`"),
        (json.dumps(changed(version=2)), "version 2, expected 1"),
        (json.dumps(changed(figures={})), "has no figures"),
        (json.dumps(changed(ranks=0)), "ranks is 0"),
        (json.dumps(changed(has_gpus="no")), "has_gpus is 'no', expected true or false"),
        (json.dumps(changed(figures={"inside": {"value": 1e300}})), "expected a number from 1e-12 to 1e\\+21"),
        (json.dumps(changed(figures={"warp": {"value": 9}})), "'warp' is not known"),
        (json.dumps(changed(figures={"inside": {"value": -1}})), "-1, expected a number from 1e-12"),
        (json.dumps(changed(figures={"inside": 5})), "None, expected a number from 1e-12"),
        (
            '{"format": "shardwell machine", "version": 1, "ranks": 1, "figures": {"inside": {"value": NaN}}}',
            "NaN is not a number",
        ),
        (json.dumps(changed(figures={"matmul fp32": {"value": [[1]]}})), "expected pairs"),
        (json.dumps(changed(figures={"matmul int3": {"value": [[1, 1]]}})), "'matmul int3' is not known"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, contents: str, words: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(contents)
    with pytest.raises(ConfigError, match=words):
        read_calibration(path)


def test_a_file_that_is_not_there_and_one_that_says_too_little_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_calibration(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="says too little"):
        replace(MEASURED, figures={"inside": FIGURES["inside"]}).speeds()


@pytest.mark.parametrize(
    ("text", "number"), [("4M", 4_000_000), ("1.5T", 15 * 10**11), ("2000", 2000), ("3b", 3 * 10**9)]
)
def test_numbers_of_tokens(text: str, number: int) -> None:
    assert parse_count(text, "--tokens") == number


@pytest.mark.parametrize("text", ["", "many", "-3", "0", "4MB"])
def test_other_numbers_of_tokens_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number such as"):
        parse_count(text, "--tokens")


@pytest.mark.parametrize(
    ("link", "drive", "words"),
    [
        ("infiniband", "nvme-gen4", "no link is known"),
        (None, "nvme", "no drive is known"),
        (None, "0xnvme", "no drive"),
    ],
)
def test_unknown_links_and_drives_are_refused(link: str | None, drive: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_speeds(SimulatedMachine(), "h100", link, drive, None)


def test_a_price_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="Add --tokens"):
        cost_of(None, None, 2.0)  # type: ignore[arg-type]


@pytest.mark.slow
def test_this_machine_is_measured_and_planned_with(tmp_path: Path) -> None:
    out = tmp_path / "machine.json"
    done = shardwell("calibrate", "--ranks", "2", "--out", out, "--disk", tmp_path)
    assert done.returncode == 0, done.stderr
    found = read_calibration(out)
    assert found.ranks == 2
    assert {"matmul fp32", "device_memory", "host_update", "inside", "inside_seconds", "disk_read"} <= set(
        found.figures
    )
    assert {"out_of_place_share", "eight_bit_share"} <= set(found.figures)
    assert found.speeds().inside > 0


def test_places_that_cannot_be_written_or_measured_are_refused(tmp_path: Path) -> None:
    for args, words in ((("--disk", tmp_path / "none"), "is no directory"), (("--out", tmp_path), "expected a file")):
        done = shardwell("calibrate", *args)
        assert done.returncode == 2
        assert words in " ".join(done.stderr.split())
