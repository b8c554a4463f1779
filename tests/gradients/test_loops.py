"""Loops that read, clip, change and drop `p.grad`, and step an optimizer of their own, follow plain PyTorch."""

from __future__ import annotations

import pytest

from tests.support.gradient_loops import LOOPS, differences
from tests.support.ranks import Ranks

HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "shardwell": {"commit": "after_norm"}}
DISK = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}, "shardwell": {"commit": "after_norm"}}
EVEN, ODD = list(LOOPS)[::2], list(LOOPS)[1::2]  # where two cases share the loops, every two choices meet still


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_loops_around_gradients_follow_plain_pytorch(ranks: Ranks, stage: int) -> None:
    """Stages 0 to 2 share the loops: they differ in when gradients are reduced, not in what the loops see."""
    loops = {0: ODD, 1: EVEN, 2: ODD}.get(stage, list(LOOPS))
    assert ranks.run(2, differences, stage, loops, "given", {}) == [{}, {}]


@pytest.mark.slow
def test_shards_of_three_ranks_follow_plain_pytorch(ranks: Ranks) -> None:
    assert ranks.run(3, differences, 3, ODD[::2], "given", {}) == [{}] * 3


@pytest.mark.parametrize(("stage", "loops"), [(0, EVEN), (2, ODD), (3, list(LOOPS))], ids=["0", "2", "3"])
def test_a_rank_that_is_alone_follows_plain_pytorch(ranks: Ranks, stage: int, loops: list[str]) -> None:
    assert ranks.run(1, differences, stage, loops, "given", {}) == [{}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "extra", "loops"),
    [(2, HOST, EVEN), (3, HOST, ODD), (2, DISK, ODD[::2]), (3, DISK, EVEN)],
    ids=["host-2", "host-3", "disk-2", "disk-3"],
)
def test_gradients_below_the_device_follow_plain_pytorch(
    ranks: Ranks, stage: int, extra: dict[str, object], loops: list[str]
) -> None:
    assert ranks.run(2, differences, stage, loops, "given", extra) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("given", ["before", "after"])
def test_an_optimizer_that_nobody_gave_is_taken_over_at_its_first_step(ranks: Ranks, stage: int, given: str) -> None:
    """As DDP and FSDP2 have it: the engine has none, and the loop steps its own. The stages share the loops."""
    loops = [name for name in LOOPS if name != "closure"][(stage + 2 * (given == "after")) % 4 :: 4]
    assert ranks.run(2, differences, stage, loops, given, {}) == [{}, {}]


@pytest.mark.parametrize("stage", [0, 3])
def test_the_optimizer_that_initialize_returns_can_be_stepped(ranks: Ranks, stage: int) -> None:
    loops = ["plain_loop", "clip_norm", "drop_by_module", "closure"]
    assert ranks.run(2, differences, stage, loops, "returned", {}) == [{}, {}]
