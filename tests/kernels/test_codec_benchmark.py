"""The benchmark of the codecs runs, and tells what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import codec

pytestmark = pytest.mark.slow


def test_every_contender_is_timed_in_every_round(tmp_path: Path) -> None:
    path = tmp_path / "codec.json"
    assert codec.main(["--numel", "16000", "--threads", "1", "--rounds", "2", "--out", str(path)]) == 0
    found = json.loads(path.read_text())["threads"]["1"]
    assert {name: len(times) for name, times in found["raw"].items()} == dict.fromkeys(found["raw"], 2 * 16)
    assert len(found["raw"]) == 1 + 3 * 5
    assert found["summary"].keys() == found["raw"].keys()
    assert found["summary"][codec.COPY]["share_of_copy"] == 1
