"""What goes on beside a unit: the next is gathered, the one after it goes to the device, those behind come from disk.

A device with memory of its own is played by the host here: what would be copied to it is copied all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import shardwell
from shardwell.memory import StateKind, TemporaryBuffers
from shardwell.offload.disk import DiskTransfer
from shardwell.offload.param_swap import ReadAheadDepth
from shardwell.offload.storage import TieredStorage
from shardwell.utils import safe_set_full_fp32_param
from tests.support.execution_orders import IN_ORDER, ORDERS, PLACES, Ring, in_any_order, lifting, ring
from tests.support.internals import groups_of, handed_out, lifted_shard_of, temporary_buffers_of, units_of
from tests.support.models import whole_parameters
from tests.support.offload_cases import blocks, check_equal, story
from tests.support.ranks import Ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "commit"),
    list(zip([*PLACES, PLACES[-1]], ["after_norm", "at_once", "after_norm", "at_once", "after_norm"], strict=True)),
)
def test_what_was_lifted_is_what_rests_also_after_wrong_guesses(
    ranks: Ranks, tmp_path: Path, place: tuple[str, str], commit: str
) -> None:
    block = blocks(*place, tmp_path)
    expected, none = ranks.run(2, in_any_order, block, commit, lifts=False)[0]
    found, some = ranks.run(2, in_any_order, block, commit, lifts=True)[0]
    check_equal(found, expected)
    assert none == 0
    assert some > len(ORDERS)


def lifted_story(block: dict[str, Any]) -> Any:
    with lifting() as lifted:
        found = story(block, 3, "fp32")
        assert lifted
        return found


@pytest.mark.slow
@pytest.mark.parametrize("place", [PLACES[1], PLACES[3]], ids="-".join)
def test_whoever_looks_or_changes_sees_the_same(ranks: Ranks, tmp_path: Path, place: tuple[str, str]) -> None:
    expected = ranks.run(2, story, blocks(*place, tmp_path), 3, "fp32")
    for one, other in zip(ranks.run(2, lifted_story, blocks(*place, tmp_path)), expected, strict=True):
        check_equal(one, other)


def changed_between(block: dict[str, Any]) -> tuple[Tensor, int]:
    """The model is called without the engine, which begins no pass; what was lifted for later is changed."""
    with lifting() as lifted:
        engine, _ = ring(block, ORDERS[:2])
        x = torch.ones(2, 16).bfloat16()
        with torch.no_grad():
            engine.module(x, IN_ORDER[:3])
            assert lifted_shard_of(units_of(engine)[4].groups[0]) is not None
            safe_set_full_fp32_param(engine.module.blocks[4][0].weight, torch.zeros(16, 16))
            with shardwell.zero.GatheredParameters([engine.module.blocks[4][0].bias], modifier_rank=0):
                engine.module.blocks[4][0].bias.fill_(0.25)
            return engine.module(x, [4]), len(lifted)


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_who_changes_what_was_lifted_sees_the_change(ranks: Ranks, tmp_path: Path, place: tuple[str, str]) -> None:
    for found, num_lifted in ranks.run(2, changed_between, blocks(*place, tmp_path)):
        assert torch.equal(torch.as_tensor(found), 1 + torch.tensor(0.25).bfloat16().tanh().expand(2, 16))
        assert num_lifted > 0


def coded(block: dict[str, Any], *, lifts: bool) -> tuple[dict[str, Tensor], dict[bool, int]]:
    """The parameters that were learned, and how many shards were lifted in numbers, and in codes that they rest in."""
    coding = {"zero_quantized_weights": True, "zero_quantized_nontrainable_weights": True}
    with lifting(lifts) as lifted:
        engine, _ = ring({**block, **coding}, ORDERS, num_frozen=3, shardwell={"keep_frozen": 0})
        encoded = {group.name: group.is_quantized for group in groups_of(engine)}
        assert set(encoded.values()) == {False, True}
        counts = {kind: sum(encoded[name] is kind for name in lifted) for kind in (False, True)}
        return whole_parameters(engine.module), counts


@pytest.mark.parametrize(
    ("tier", "copies"), [("nvme", {}), ("cpu", {"zero_hpz_partition_size": 2})], ids=["", "second copies"]
)
def test_codes_are_lifted_too(ranks: Ranks, tmp_path: Path, tier: str, copies: dict[str, int]) -> None:
    block = {**blocks(tier, tier, tmp_path), **copies}
    expected, none = ranks.run(2, coded, block, lifts=False)[0]
    found, some = ranks.run(2, coded, block, lifts=True)[0]
    check_equal(found, expected)
    assert none == {False: 0, True: 0}
    assert some[False] > 0
    assert some[True] > 0 or copies  # frozen ones need not leave their node again


# -------------------------------------------------------------------------------------------------------- schedule


def recorded(block: dict[str, Any], **others: Any) -> str:
    """The tokens of the third step, with a drive that is asked one unit ahead of the copy."""
    with lifting(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReadAheadDepth, "depth", 1)
        return " ".join(map(str, ring(block, [IN_ORDER] * 3, **others)[1]))


def test_four_stages_run_beside_each_other(ranks: Ranks, tmp_path: Path) -> None:
    """While unit 1 computes, 2 is gathered, 3 goes to the device and 4 comes from disk. Backward mirrors it."""
    tokens = ranks.run(2, recorded, blocks("nvme", "nvme", tmp_path))[0]
    for beside in ("G2 U3 D4 F1", "G3 U4 D5 F2", "B4 G3 U2 D1", "B3 G2 U1 D0"):
        assert beside in tokens, tokens


def test_three_do_from_the_host(ranks: Ranks, tmp_path: Path) -> None:
    tokens = ranks.run(2, recorded, blocks("cpu", "cpu", tmp_path))[0]
    for beside in ("G2 U3 F1", "G3 U4 F2", "B4 G3 U2", "B3 G2 U1"):
        assert beside in tokens, tokens
    assert "D" not in tokens


def test_a_rank_that_is_alone_has_no_stage_between_disk_and_gather(ranks: Ranks, tmp_path: Path) -> None:
    tokens = ranks.run(1, recorded, blocks("nvme", "nvme", tmp_path), shardwell={"shard_at_world_one": True})[0]
    for beside in ("G2 D3 F1", "B4 G3 D2"):
        assert beside in tokens, tokens
    assert "U" not in tokens


def staged(block: dict[str, Any], orders: list[list[int]]) -> tuple[int, int, int]:
    """The most bytes of lifted copies at once, those of one shard of a block, and what is left of them after a step."""
    most, lift = 0, TieredStorage.prefetch_to_device

    def watched(shard: TieredStorage) -> bool:
        nonlocal most
        is_lifted = lift(shard)
        most = max(most, sum(one.nbytes for one in copies()))
        return is_lifted

    def copies() -> list[Tensor]:
        return [lifted[0] for group in groups_of(engine) if (lifted := lifted_shard_of(group)) is not None]

    with lifting():
        engine, _ = ring(block, ORDERS[:2])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TieredStorage, "prefetch_to_device", watched)
            for order in orders:
                engine.backward(engine(torch.ones(2, 16).bfloat16(), order).float().mean())
                engine.step()
            with torch.no_grad():
                engine.eval()
                engine(torch.ones(2, 16).bfloat16(), IN_ORDER[:3])
        left = [entry for entry in handed_out(temporary_buffers_of(engine)).values() if entry[1] is StateKind.STAGING]
        assert len(left) == len(copies())
        return most, units_of(engine)[-1].resharding_groups[0].layout.shard_numel * 2, len(left)


@pytest.mark.parametrize("orders", [[IN_ORDER] * 2, ORDERS], ids=["in order", "wrong guesses"])
def test_copies_of_two_shards_at_a_time_at_most(ranks: Ranks, orders: list[list[int]]) -> None:
    """One, and one more where the next unit waits for its update and is not gathered ahead."""
    most, shard, left = ranks.run(2, staged, blocks("cpu", "cpu", ""), orders)[0]
    assert 0 < most <= 2 * shard
    assert left == 0


def hindered(block: dict[str, Any], by: str) -> tuple[dict[str, Tensor], int]:
    """Reads that fail are the matter of who needs them; memory that is short is nobody's."""
    take = TemporaryBuffers.allocate

    def short(temporary: TemporaryBuffers, numel: int, dtype: torch.dtype, state: StateKind, unit: str) -> Tensor:
        if state is StateKind.STAGING and unit.startswith("blocks"):
            raise torch.OutOfMemoryError
        return take(temporary, numel, dtype, state, unit)

    with lifting() as lifted, pytest.MonkeyPatch.context() as patch:
        if by == "memory":
            patch.setattr(TemporaryBuffers, "allocate", short)
        else:
            patch.setattr(DiskTransfer, "has_succeeded", False)
        engine, _ = ring(block, ORDERS)
        return whole_parameters(engine.module), len(lifted)


@pytest.mark.slow
def test_what_cannot_be_lifted_is_gathered_all_the_same(ranks: Ranks, tmp_path: Path) -> None:
    block = blocks("nvme", "nvme", tmp_path)
    expected, _ = ranks.run(2, in_any_order, block, "auto", lifts=False)[0]
    for by in ("memory", "reads"):
        found, num_lifted = ranks.run(2, hindered, block, by)[0]
        check_equal(found, expected, by)
        assert num_lifted == 0, by


class Recomputed(Ring):
    """Runs in order; each block is recomputed in backward, which enters it twice."""

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = torch.utils.checkpoint.checkpoint(self.blocks[index], x, use_reentrant=False) + x
        return x


def entered(path: str) -> int:
    """How often a unit is said to come, in a step."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "Ring", Recomputed)
        engine, _ = ring(blocks("nvme", "nvme", path), [IN_ORDER] * 2, shardwell={"shard_at_world_one": True})
        patch.setattr(ReadAheadDepth, "enter", lambda pace: calls.append(pace))
        engine.backward(engine(torch.ones(2, 16).bfloat16().requires_grad_(), IN_ORDER).float().mean())
        engine.step()
    return len(calls)


def test_a_unit_that_is_entered_twice_comes_once(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(1, entered, str(tmp_path))[0] == 2 * len(IN_ORDER)
