"""A small GPT learns real text as well when what travels is encoded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import accuracy
from benchmarks.accuracy_worker import ALL, Lesson, learned
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Small(Lesson):
    """A lesson of a small model with few words."""

    steps: int = 40
    learning_rate: float = 6e-3
    width: int = 32
    num_blocks: int = 1
    num_heads: int = 2
    context: int = 32
    rows: int = 8
    tested_rows: int = 64


def test_the_loss_on_unseen_text_is_within_one_percent(ranks: Ranks) -> None:
    """Two nodes of two ranks: gradients travel in 8 bits and then in 4, and backward uses the copy in the node."""
    plain = ranks.run(4, learned, Small(), {})[0]
    coded = ranks.run(4, learned, Small(), {"zero_optimization": ALL})[0]
    assert plain["after"] < 0.6 * plain["before"]
    assert plain["after"] != coded["after"]
    assert coded["after"] == pytest.approx(plain["after"], rel=0.01)


def test_the_benchmark_keeps_the_curve_and_the_ratio_of_each_variant(
    tmp_path: Path, preloaded_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "Lesson", Small)
    path = tmp_path / "accuracy.json"
    assert accuracy.main(["--steps", "3", "--only", "zero++", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    plain, coded = report["variants"]["stage3"], report["variants"]["zero++"]
    assert len(plain["curve"]) == len(coded["curve"]) == report["lesson"]["steps"] == 3
    assert coded["curve"] != plain["curve"]
    assert report["ratios"] == {"stage3": 1.0, "zero++": coded["after"] / plain["after"]}
