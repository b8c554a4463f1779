"""What a trace says of the link: lanes, their shares of a step, and how long no collective ran."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.link_floor import unit_sizes
from benchmarks.link_picture import draw, panels
from benchmarks.model import BASE
from benchmarks.streams import lanes

pytestmark = pytest.mark.slow


def event(name: str, begin: float, end: float, kind: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "args": {"stream": 7}}


TRACE = {
    "traceEvents": [
        event("gemm", 1000.0, 5000.0),
        event("ncclDevKernel_AllGather_RING_LL", 2000.0, 4000.0),
        event("ncclDevKernel_SendRecv", 3000.0, 6000.0),
        event("Memcpy DtoD", 10_000.0, 11_000.0, "gpu_memcpy"),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 50_000.0},
    ]
}


def test_the_link_is_idle_where_no_collective_runs() -> None:
    found = lanes(TRACE)
    assert found["milliseconds"] == 10.0
    assert found["lanes"]["all-gather"] == [[1.0, 3.0]]
    assert found["lanes"]["reduction"] == [[2.0, 5.0]]
    assert math.isclose(found["link_idle"], 0.6)
    expected = {"compute": 0.4, "all-gather": 0.2, "reduction": 0.3, "copy": 0.1, "both directions": 0.1}
    assert found["busy"] == pytest.approx(expected)
    assert lanes({"traceEvents": []})["link_idle"] == 1.0


def test_a_picture_has_a_panel_for_each_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = {"error": None, "ranks": [lanes(TRACE), lanes(TRACE)]}
    failed = {"error": "failed: no result within 120 s", "ranks": []}
    found = panels([("before", {"lanes": {"base x 2": {"shardwell3": run, "fsdp2": failed}}})])
    assert [title for title, _ in found] == ["shardwell3, base x 2 ranks, before"]
    draw(found, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size > 1000


def test_the_floor_moves_what_the_model_has() -> None:
    sizes = unit_sizes(BASE, 2)
    assert len(sizes) == BASE.blocks + 2
    assert 0 <= sum(sizes) - (BASE.num_parameters - BASE.width) < 16 * len(sizes)
