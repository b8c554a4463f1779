"""Tensor parallelism on the data axes of ZeRO: the numbers of one process, at every stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.ranks import Ranks
from tests.support.tensor_models import HEAD, PLAN, WORDS, TensorCase, on_grid, plainly
from tests.support.training import distance

TIED = TensorCase(plan={**PLAN, **HEAD}, model={"tied": True})
LOSS = TensorCase(plan={**PLAN, **WORDS, "head": "colwise"}, loss_parallel=True)
SEQUENCE = TensorCase(tensor={"sequence_parallel": True})
RECOMPUTED = replace(SEQUENCE, model={"frozen": True, "recompute": True})
CASES = {  # tensor ranks with whole sequences, with parts of sequences and with parallel losses at every stage
    0: [TIED, LOSS, RECOMPUTED],
    1: [TensorCase(), replace(LOSS, accumulation=2), SEQUENCE],
    2: [replace(TIED, accumulation=2), LOSS, SEQUENCE],
    3: [TensorCase(plan=PLAN, model={"tied": True}, accumulation=2), LOSS, RECOMPUTED],
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", CASES)
def test_tensor_and_data_axes_follow_one_process(ranks: Ranks, stage: int) -> None:
    for found in ranks.run(4, on_grid, CASES[stage], stage)[::3]:
        for case, values in zip(CASES[stage], found, strict=True):
            difference, name = distance(values, plainly(case))
            assert difference < 1e-10, f"{case}: {name} differs by {difference}"
