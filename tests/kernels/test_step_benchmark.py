"""The benchmark of the kernels runs, and tells what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import kernels
from tests.support.kernel_cases import isas

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not isas(), reason="the native library was not built")
def test_every_contender_is_timed_in_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # it compiles for minutes at its first use
    path = tmp_path / "kernels.json"
    assert kernels.main(["--numel", "16000", "--threads", "1", "--rounds", "2", "--out", str(path)]) == 0
    found = json.loads(path.read_text())["threads"]["1"]
    assert {name: len(times) for name, times in found["raw"].items()} == dict.fromkeys(found["raw"], 2 * 16)
    assert found["summary"]["contenders"].keys() == found["raw"].keys() >= {kernels.OURS, kernels.FUSED, "triad"}
    assert found["summary"]["targets"].keys() >= {kernels.FUSED, "bandwidth"}
