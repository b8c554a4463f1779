"""Sequence parallelism on the data axes of ZeRO: the numbers of one process, at every stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.ranks import Ranks
from tests.support.sequence_models import SequenceCase, on_axis, plainly
from tests.support.training import distance

PACKED = SequenceCase(model={"kv_heads": 1, "module": True}, data="packed")
PADDED = SequenceCase(model={"kv_heads": 2, "recompute": True}, data="padded")
SPARSE = SequenceCase(data="sparse", accumulation=2)
LLAMA = SequenceCase(family="Llama")
CASES = {
    0: [PACKED, LLAMA],
    1: [PADDED, replace(LLAMA, data="packed")],
    2: [SPARSE, SequenceCase(model={"kv_heads": 2})],
    3: [replace(PACKED, accumulation=2), PADDED, replace(SPARSE, accumulation=1), replace(LLAMA, data="packed")],
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", CASES)
def test_sequence_and_data_axes_follow_one_process(ranks: Ranks, stage: int) -> None:
    for found in ranks.run(4, on_axis, CASES[stage], stage)[::3]:
        for case, values in zip(CASES[stage], found, strict=True):
            difference, name = distance(values, plainly(case))
            assert difference < 1e-10, f"{case}: {name} differs by {difference}"
