"""The peak that a plan names, activations included, is the peak of the tensors that live on a real rank."""

from __future__ import annotations

import pytest

from tests.support.planned_activations import ActivationCase, pairs_on_rank_0
from tests.support.ranks import Ranks

# By the number of ranks. All stages are alike on one rank: each kind of model and of step is there once or twice.
CASES = {
    1: [
        ActivationCase("decoder", 0, accumulation=2),
        ActivationCase("all", 2, accumulation=2),
        ActivationCase("all", 3, recomputes=True, accumulation=2),
        ActivationCase("lora", 0, accumulation=2),
    ],
    2: [
        ActivationCase("decoder", 1, recomputes=True),
        ActivationCase("all", 2, accumulation=2),
        ActivationCase("decoder", 3),
        ActivationCase("lora", 3, recomputes=True),
        ActivationCase("all", 0, recomputes=True, accumulation=2),
    ],
}
TEMPORARY = 1 << 20  # bytes: on CPUs a span of master weights is rounded in torch operations, on GPUs by one kernel


@pytest.mark.slow
@pytest.mark.parametrize("size", CASES)
def test_the_planned_peak_is_that_of_living_tensors(ranks: Ranks, size: int) -> None:
    """The plan is one of GPUs. On several CPU ranks, recomputed blocks take up to one unit less."""
    found = ranks.run(size, pairs_on_rank_0, CASES[size])[0]
    for case, (planned, counted) in zip(CASES[size], found, strict=True):
        most = 1.03 if size > 1 and case.recomputes else 1.01
        assert (counted - TEMPORARY) * 0.99 <= planned <= counted * most, (case, planned / counted)
