"""What a step costs on the host beside FSDP2's, and what a manifest costs by the number of ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.manifest import layouts, measure
from benchmarks.model import TINY
from tests.support.command import ROOT, environment
from tests.support.patience import HANG

pytestmark = pytest.mark.slow

MOST_ROUNDS = 6  # of CPU seconds beside other tests


def own_time(folder: Path) -> dict[str, Any]:
    """The figures of a process in which nothing watches for leaks; blocks are units of their own."""
    path = folder / "host-cost.json"
    options = ["--ranks", "2", "--blocks", "24", "--steps", "5", "--rows", "fsdp2,1,2,3", "--set", "bundle_size=0"]
    command = [sys.executable, "-m", "benchmarks.host_cost", *options, "--json", str(path)]
    subprocess.run(command, env=environment(root=True), cwd=ROOT, check=True, timeout=HANG, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(path.read_text())["found"]["2"]
    return found


def test_a_step_takes_at_most_two_fifths_of_fsdp2s_host_time_beside_its_passes(tmp_path: Path) -> None:
    shares = []
    for _ in range(MOST_ROUNDS):
        found = own_time(tmp_path)
        assert found["3"]["calls"] == {"gather": 52, "reduce": 27, "publish": 1}  # of 24 blocks, embedding, head, root
        own = {name: one["own_us_per_block"] for name, one in found.items()}
        shares.append(max(own[stage] for stage in ("1", "2", "3")) / own["fsdp2"])
        if shares[-1] <= 0.4:
            return
    pytest.fail(f"shares {shares}")


def test_each_rank_adds_its_pieces_to_a_manifest() -> None:
    few, many = measure(TINY, 2), measure(TINY, 16)
    num_tensors = 3 * sum(len(layout.slots) for layout in layouts(TINY, 2))
    assert num_tensors <= few["pieces"] <= num_tensors + 3 * len(layouts(TINY, 2))  # a rank's slice cuts one at most
    assert few["pieces"] < many["pieces"] <= num_tensors + 15 * 3 * len(layouts(TINY, 16))
    assert few["bytes"] < many["bytes"]
