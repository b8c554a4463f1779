"""Sequence parallelism on the data axes of ZeRO: the numbers of one process, at every stage."""

from __future__ import annotations

import pytest

from tests.support.ranks import Ranks
from tests.support.sequence_models import SequenceCase, on_axis, plainly
from tests.support.training import distance

CASES = [
    SequenceCase(model={"kv_heads": 2}),
    SequenceCase(model={"kv_heads": 1, "module": True}, data="packed", accumulation=2),
    SequenceCase(model={"recompute": True}, data="padded"),
    SequenceCase(data="sparse", accumulation=2),
    SequenceCase(family="Llama"),
    SequenceCase(family="Llama", data="packed"),
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sequence_and_data_axes_follow_one_process(ranks: Ranks, stage: int) -> None:
    for found in ranks.run(4, on_axis, CASES, stage)[::3]:
        for case, values in zip(CASES, found, strict=True):
            difference, name = distance(values, plainly(case))
            assert difference < 1e-10, f"{case}: {name} differs by {difference}"
