"""A simulated rank counts what a real one counts: memory by tier, traffic by hop, bytes from and to disk."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.support.plan_matrix import PlanCase, differences, on_rank, pairwise
from tests.support.ranks import Ranks


@cache
def drawn_cases() -> list[PlanCase]:
    """Return the cases of all tests, which take seconds to choose: not where files are only collected."""
    return pairwise()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_simulated_rank_counts_what_a_real_one_counts(size: int, ranks: Ranks, tmp_path: Path) -> None:
    cases = [case for case in drawn_cases() if case.ranks == size]
    found = ranks.run(size, on_rank, cases, str(tmp_path))
    wrong = [
        f"{case}: rank {rank}: {words}"
        for rank, pairs in enumerate(found)
        for case, pair in zip(cases, pairs, strict=True)
        if pair[1] is not None
        for words in differences(case, *pair)
    ]
    assert wrong == []


def test_every_two_choices_meet() -> None:
    cases = drawn_cases()
    for stage in range(4):
        assert {case.ranks for case in cases if case.stage == stage} == {1, 2, 4}
        assert {case.precision for case in cases if case.stage == stage} == {"fp32", "bf16", "fp16", "autocast"}
    tiers = {(case.states, case.parameters) for case in cases}
    assert tiers == {(one, other) for one in ("none", "cpu", "nvme") for other in ("none", "cpu", "nvme")}
    assert {case.codec for case in cases if case.states == "nvme"} == {case.codec for case in cases}


def test_a_case_that_differs_is_told(ranks: Ranks, tmp_path: Path) -> None:
    cases = [PlanCase(1, 3, accumulation=2), PlanCase(1, 3, precision="fp32")]
    (real, _), (_, plan) = ranks.run(1, on_rank, cases, str(tmp_path))[0]
    told = " ".join(differences(cases[0], real, plan))
    assert "at rest after step 1" in told
    assert "peaks of step 3" in told
