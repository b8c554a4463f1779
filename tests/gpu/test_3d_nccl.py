"""Tensor, pipeline and data axes on NCCL ranks that share a GPU: the numbers of one process, and gloo's bits."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parallel3d import LAUNCHES, run

pytestmark = pytest.mark.slow

FURTHEST = 1e-10  # fp64, 3 steps


def figures(name: str, folder: Path) -> list[dict[str, Any]]:
    launch = next(one for one in LAUNCHES if one.name == name)
    report = run(launch, Namespace(device="cuda", size="tiny", steps=3, limit=120.0), folder)
    assert report["error"] is None, report["error"]
    found: list[dict[str, Any]] = report["cases"]
    return found


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [2, 4, 8])
def test_layouts_on_nccl_follow_one_process_with_the_bits_of_gloo(tmp_path: Path, number: int) -> None:
    found = figures(f"exact-{number}", tmp_path)
    for case in found:
        assert case["distance"] < FURTHEST
        assert case["ranks_agree"]
    if number == 2:  # of two terms there is one sum; with more their order may differ
        for case, other in zip(found, figures("exact-2-gloo", tmp_path), strict=True):
            assert case["digests"] == other["digests"]
