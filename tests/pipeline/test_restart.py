"""A job that fails is restarted by the launcher in another layout, and goes on from its checkpoint."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.changing_layout import NUM_RANKS, STEPS
from tests.support.command import ROOT, arguments, environment
from tests.support.packed_models import Leg, alone
from tests.support.patience import HANG


@pytest.mark.slow
def test_a_killed_pipeline_is_restarted_with_a_tensor_axis(tmp_path: Path) -> None:
    command = arguments("run", "-n", str(NUM_RANKS), "--max-restarts", "1", "-m", "tests.support.changing_layout")
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), environment()["PYTHONPATH"]])}
    result = subprocess.run(
        [*command, str(tmp_path)],
        env={**environment(), **paths},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert not (tmp_path / "whole-0.pt").exists()
    found = torch.load(tmp_path / "whole-1.pt", weights_only=True)
    for name, value in alone([Leg()], STEPS).items():
        assert (found[name] - value).abs().max() < 1e-10, name
