"""Expert parallelism on the data axes of ZeRO: the numbers of one process, at every stage."""

from __future__ import annotations

import pytest

from tests.support.expert_models import ExpertCase, on_axis, plainly
from tests.support.ranks import Ranks
from tests.support.training import distance

SKEWED = ExpertCase(model={"skew": 9.0})  # the ranks of the last two experts get no token at all
LISTED = ExpertCase(model={"listed": True}, accumulation=2)
MIXTRAL = ExpertCase(family="Mixtral", model={"num_local_experts": 4, "experts_implementation": "eager"}, steps=4)
CASES = {0: [ExpertCase(), MIXTRAL], 1: [SKEWED, LISTED], 2: [ExpertCase(), MIXTRAL], 3: [SKEWED, LISTED, MIXTRAL]}


@pytest.mark.slow
@pytest.mark.parametrize("stage", CASES)
def test_expert_and_data_axes_follow_one_process(ranks: Ranks, stage: int) -> None:
    for found in ranks.run(4, on_axis, CASES[stage], stage)[::3]:
        for case, values in zip(CASES[stage], found, strict=True):
            difference, name = distance(values, plainly(case))
            assert difference < 1e-10, f"{case}: {name} differs by {difference}"
