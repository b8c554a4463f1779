from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from shardwell import kernels
from shardwell.cli import doctor_command
from shardwell.cli.doctor_command import check
from shardwell.version import __version__
from tests.support.command import shardwell


@pytest.fixture(scope="module")
def machine() -> subprocess.CompletedProcess[str]:
    return shardwell("doctor", "--json")


def test_doctor_finds_a_machine_that_can_train(machine: subprocess.CompletedProcess[str]) -> None:
    assert (machine.returncode, json.loads(machine.stdout)["ok"]) == (0, True)


def test_doctor_runs_a_real_all_reduce_on_gloo(machine: subprocess.CompletedProcess[str]) -> None:
    assert json.loads(machine.stdout)["backends"]["gloo"] == "works"


def test_doctor_calls_an_old_torch_broken() -> None:
    sections = {
        "versions": {"torch": "2.10.1+cpu", "triton": "3.0"},
        "devices": {"gpus": []},
        "backends": {"gloo": "works", "nccl": "missing"},
        "bf16_on_cpu": True,
        "kernels": {"native": True},
    }
    worst = check(sections)[0]
    assert (worst.level, worst.remedy) == ("broken", "pip install 'torch>=2.11'")


def test_doctor_tells_which_kernels_run(machine: subprocess.CompletedProcess[str]) -> None:
    assert json.loads(machine.stdout)["kernels"] == asdict(kernels.describe())


@pytest.mark.slow
def test_doctor_measures_a_disk_only_when_asked(
    machine: subprocess.CompletedProcess[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(machine.stdout)["disk"].keys() == {"unusable", "path"}
    monkeypatch.setenv("SHARDWELL_IO", "python")
    found = doctor_command.disk(tmp_path)
    assert (found["engine"], found["path"], os.listdir(tmp_path)) == ("python", str(tmp_path), [])
    assert list(found["speeds"]) == ["python"]
    assert min(found["speeds"]["python"][job] for job in ("read", "write", "mixed")) > 0
    assert ["GB/s" in text for _, text in doctor_command._disk_rows(found)] == [False, True]


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version_is_the_packages(argument: str) -> None:
    assert shardwell(argument).stdout == f"{__version__}\n"


def test_a_good_config_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}')
    assert json.loads(shardwell("config", file, "--json").stdout)["zero_optimization"]["stage"] == 3


def test_a_bad_config_is_exit_code_two_and_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text('{"zero_optimization": {"stage": 7}}')
    result = shardwell("config", file)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert "zero_optimization.stage" in result.stderr
