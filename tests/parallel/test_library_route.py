"""The library's route with real peers: four ranks as two nodes, as NCCL would have them."""

from __future__ import annotations

import pytest

from tests.support.library_route import NUM_RANKS, complaints, on_the_cpu
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_follow_plain_pytorch_and_no_step_leaves_bytes_behind(ranks: Ranks, stage: int) -> None:
    found = ranks.run(NUM_RANKS, on_the_cpu, stage)
    wrong = [words for answers in found for words in complaints(answers)]
    assert not wrong, "\n".join(wrong)
