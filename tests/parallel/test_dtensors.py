"""Models that come cut as DTensors, by torch's `parallelize_module`: the numbers of one process, at every stage."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.support.dtensor_models import dtensors_follow
from tests.support.ranks import Ranks
from tests.support.tensor_models import TensorCase, plainly
from tests.support.training import distance

KINDS = {0: ["plain"], 1: ["sequence"], 2: ["loss"], 3: ["sequence", "loss"]}  # test_dtensor_uses.py: 3, "plain"


@pytest.mark.slow
@pytest.mark.parametrize("stage", KINDS)
def test_dtensors_follow_one_process(ranks: Ranks, stage: int) -> None:
    case = TensorCase(model={"blocks": 1 if stage < 3 else 2})
    for found in ranks.run(4, dtensors_follow, case, KINDS[stage], stage)[::3]:
        for kind, values in zip(KINDS[stage], found, strict=True):
            difference, name = distance(values, plainly(case))
            assert difference < 1e-10, f"{kind}: {name} differs by {difference}"


def after_other_groups(num_groups: int, case: TensorCase) -> int:
    """Make groups first, so that those of the mesh get other names than in the job before."""
    for _ in range(num_groups):
        dist.new_group(list(range(dist.get_world_size())))
    return len(dtensors_follow(case, ["plain"], 0))


@pytest.mark.slow
def test_meshes_of_an_earlier_process_group_are_forgotten(ranks: Ranks) -> None:
    """torch's caches of DTensor operations return the mesh of the first job, which is equal, and has no groups left."""
    for num_groups in (3, 0):
        assert ranks.run(4, after_other_groups, num_groups, TensorCase(model={"blocks": 1}, steps=1)) == [1] * 4
