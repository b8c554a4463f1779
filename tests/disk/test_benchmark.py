"""The benchmark of the disk tier runs, and tells what it found and what it could not run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import disk
from shardwell.offload.disk_queue import ENGINES, unusable

pytestmark = pytest.mark.slow

FIO = """#!/bin/sh
for word in "$@"; do case "$word" in --filename=*) : > "${word#*=}";; esac; done
echo '{"jobs": [{"read": {"bw_bytes": 4000000000}, "write": {"bw_bytes": 4000000000}}]}'
"""


def run(tmp_path: Path) -> dict[str, object]:
    out, drive = tmp_path / "disk.json", tmp_path / "drive"
    drive.mkdir()
    call = ["--path", str(drive), "--bytes", str(4 << 20), "--block-size", "65536", "--rounds", "2", "--out", str(out)]
    assert disk.main(call) in (0, 1)  # so little data says nothing about the target
    assert os.listdir(drive) == []
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def test_every_contender_does_every_job_and_what_it_wrote_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # it compiles for minutes at its first use
    monkeypatch.setattr(disk.shutil, "which", lambda name: None)
    found = run(tmp_path)
    assert found["wrong"] == []
    assert found["reference"] == disk.REFERENCE
    assert found["missing"].keys() >= {disk.FIO, disk.DEEPSPEED}  # type: ignore[attr-defined]
    ours = {f"shardwell, {engine}" for engine in ENGINES if engine not in unusable()}
    assert found["raw"].keys() == {disk.REFERENCE, *ours}  # type: ignore[attr-defined]
    for jobs in found["raw"].values():  # type: ignore[attr-defined]
        assert {job: len(calls) for job, calls in jobs.items()} == dict.fromkeys(disk.JOBS, 16)


def test_fio_is_the_reference_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    tool = tmp_path / "fio"
    tool.write_text(FIO)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = run(tmp_path)
    assert found["reference"] == disk.FIO
    assert found["summary"][disk.FIO]["read"]["gigabytes_per_second"] == pytest.approx(8)  # type: ignore[index]


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        disk.main(["--path", str(tmp_path / "none")])
    assert "expected a directory" in capsys.readouterr().err


def test_a_mixed_job_reads_one_half_and_writes_the_other() -> None:
    moved = disk.pieces("mixed", 100, 200, 30)
    assert moved == [
        (False, 100, 130),
        (True, 150, 180),
        (False, 130, 150),
        (True, 180, 200),
    ]
