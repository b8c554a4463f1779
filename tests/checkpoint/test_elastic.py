"""Saved at any stage, precision and number of ranks; loaded at any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.checkpoint import Folder
from shardwell.checkpoint.sources import ShardwellSource
from tests.support.checkpoint_legs import Leg, run_leg, run_leg_in_blocks, uninterrupted
from tests.support.internals import groups_of
from tests.support.ranks import Ranks
from tests.support.training import Case, distance, plainly

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
BLOCK = 64  # bytes of which each has a checksum: small models have many such blocks
CHAIN = [(4, 3), (2, 1), (3, 2), (1, 3), (2, 0)]  # (ranks, stage)


@pytest.mark.slow
def test_a_run_through_many_worlds_is_one_run(ranks: Ranks, tmp_path: Path) -> None:
    case = Case(accumulation=2, clip=0.5, groups=True)
    num_steps = 2 * len(CHAIN)
    for index, (num_ranks, stage) in enumerate(CHAIN):
        leg = Leg(stage, 2 * index, 2 * index + 2, case, loads=index > 0)
        answers = ranks.run(num_ranks, run_leg, leg, str(tmp_path))
        assert all(answer["steps"] == 2 * index + 2 for answer in answers)
    expected, _ = plainly(replace(case, steps=num_steps))
    difference, name = distance(answers[0]["ended"], expected)
    assert difference < 1e-10, f"{name} differs by {difference}"
    assert Folder(tmp_path).tags() == [f"global_step{step}" for step in range(num_steps, 0, -2)]


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(0, {}), (1, FP16), (2, BF16), (3, FP16), (3, BF16), (3, {})],
)
def test_the_same_world_and_stage_go_on_with_the_same_bits(
    ranks: Ranks, tmp_path: Path, stage: int, precision: dict[str, Any]
) -> None:
    case = Case(dtype=torch.float32, clip=0.5, groups=True)
    first = Leg(stage, 0, 2, case, precision, loads=False)
    whole = ranks.run(2, run_leg, uninterrupted(first, 4), str(tmp_path))
    before = ranks.run(2, run_leg, first, str(tmp_path))
    after = ranks.run(2, run_leg, Leg(stage, 2, 4, case, precision, saves=False), str(tmp_path))
    for rank in range(2):
        check_equal(after[rank]["loaded"], before[rank]["ended"])
        check_equal(after[rank]["ended"], whole[rank]["ended"])
        assert before[rank]["losses"] + after[rank]["losses"] == whole[rank]["losses"]


PRECISIONS = {"fp32": {}, "bf16": BF16, "fp16": FP16}
MOVES = [
    ((2, 3, "bf16"), (3, 1, "fp32")),
    ((3, 1, "fp16"), (2, 3, "bf16")),
    ((1, 2, "fp32"), (2, 2, "bf16")),
    ((2, 0, "bf16"), (1, 3, "fp16")),
    ((2, 1, "bf16"), (3, 3, "bf16")),
]


@pytest.mark.parametrize(("one", "other"), MOVES, ids=str)
def test_masters_and_state_are_the_same_bits_at_any_other_setting(
    ranks: Ranks, tmp_path: Path, one: tuple[int, int, str], other: tuple[int, int, str]
) -> None:
    case = Case(dtype=torch.float32, model={"tied": True})
    saved = ranks.run(one[0], run_leg, Leg(one[1], 0, 2, case, PRECISIONS[one[2]], loads=False), str(tmp_path))[0]
    loading = Leg(other[1], 2, 2, case, PRECISIONS[other[2]], saves=False)
    for answer in ranks.run(other[0], run_leg, loading, str(tmp_path)):
        check_equal(answer["loaded"], saved["ended"])


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


# ----------------------------------------------------------------------------------------------------- bytes read


def read_counting(leg: Leg, root: str) -> dict[str, int]:
    """How many bytes a rank read to load, and how many its shards hold."""
    opened = []
    before = ShardwellSource.close
    ShardwellSource.close = lambda self: (opened.append((self.bytes_read, self.bytes_beside)), before(self))[1]  # type: ignore
    try:
        engine = leg.engine()
        engine.load_checkpoint(root)
    finally:
        ShardwellSource.close = before  # type: ignore[method-assign]
    groups = groups_of(engine)
    own = sum(piece.numel for group in groups for run in group.spans for piece in run.pieces)
    (read, beside), stretches = opened[0], sum(len(run.pieces) for group in groups for run in group.spans)
    whole = sum(group.layout.numel for group in groups)
    return {"read": read - beside, "beside": beside, "stretches": stretches, "own": own, "all": whole}


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    ranks.run(2, run_leg_in_blocks, Leg(3, 0, 1, Case(dtype=torch.float32), loads=False), str(root), BLOCK)
    return root


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_rank_reads_no_more_bytes_than_it_holds(ranks: Ranks, saved: Path, stage: int, num_ranks: int) -> None:
    answers = ranks.run(num_ranks, read_counting, Leg(stage, 1, 1, Case(dtype=torch.float32)), str(saved))
    buffers_and_random_state = 4 + 5056 + 2496
    for answer in answers:
        extra = answer["read"] - 12 * answer["own"]  # master, first and second moment in fp32
        assert 0 <= extra <= buffers_and_random_state, answer
        assert answer["beside"] <= 3 * answer["stretches"] * 2 * BLOCK, answer  # the rest of the blocks at both ends
    assert sum(answer["own"] for answer in answers) == answers[0]["all"]
