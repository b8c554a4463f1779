"""Tensor parallelism on the data axes of ZeRO: the numbers of one process, at every stage."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks
from tests.support.tensor_models import HEAD, PLAN, WORDS, TensorCase, on_grid, plainly
from tests.support.training import distance

CASES = [
    TensorCase(),
    TensorCase(plan=PLAN, accumulation=2),
    TensorCase(tensor={"sequence_parallel": True}),
    TensorCase(plan={**PLAN, **WORDS, "head": "colwise"}, loss_parallel=True),
    TensorCase(plan={**PLAN, **HEAD}, model={"tied": True}),
    TensorCase(model={"frozen": True, "recompute": True}, tensor={"sequence_parallel": True}),
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tensor_and_data_axes_follow_one_process(ranks: Ranks, stage: int) -> None:
    for found in ranks.run(4, on_grid, CASES, stage)[::3]:
        for case, values in zip(CASES, found, strict=True):
            difference, name = distance(values, plainly(case))
            assert difference < 1e-10, f"{case}: {name} differs by {difference}"
