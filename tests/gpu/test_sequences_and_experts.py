"""Sequence and expert axes on NCCL ranks that share a GPU: the numbers of one process."""

from __future__ import annotations

import pytest

from tests.support import expert_models, sequence_models
from tests.support.expert_models import ExpertCase
from tests.support.ranks import Ranks
from tests.support.sequence_models import SequenceCase
from tests.support.training import distance

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, pytest.mark.timeout(300)]

SEQUENCES = [
    SequenceCase(model={"kv_heads": 2}),
    SequenceCase(model={"kv_heads": 1, "module": True}, data="packed", accumulation=2),
    SequenceCase(model={"recompute": True}, data="padded"),
    SequenceCase(data="sparse", accumulation=2),
]
EXPERTS = [
    ExpertCase(),
    ExpertCase(model={"skew": 9.0}),
    ExpertCase(model={"listed": True}, accumulation=2),
]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sequence_ranks_follow_one_process(nccl_ranks: Ranks, num_ranks: int, stage: int) -> None:
    for case, values in zip(
        SEQUENCES, nccl_ranks.run(num_ranks, sequence_models.on_axis, SEQUENCES, stage)[1], strict=True
    ):
        difference, name = distance(values, sequence_models.plainly(case))
        assert difference < 1e-10, f"{case}: {name} differs by {difference}"


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_expert_ranks_follow_one_process(nccl_ranks: Ranks, num_ranks: int, stage: int) -> None:
    for case, values in zip(EXPERTS, nccl_ranks.run(num_ranks, expert_models.on_axis, EXPERTS, stage)[1], strict=True):
        difference, name = distance(values, expert_models.plainly(case))
        assert difference < 1e-10, f"{case}: {name} differs by {difference}"
