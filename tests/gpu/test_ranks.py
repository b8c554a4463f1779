"""2, 3 and 4 NCCL ranks on one GPU: they follow plain PyTorch, their checkpoints fit other ranks, no host waits.

`.ci/gpu FOLDER ranks` runs what is marked `ranks`. To NCCL each rank is a host of its own; they talk through sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardwell
from tests.support.checkpoint_legs import Leg, run_leg
from tests.support.internals import board_of, roles_of
from tests.support.models import Gpt, batches, share, zero
from tests.support.rank_matrix import complaints, run_all
from tests.support.ranks import Ranks
from tests.support.several_groups import BLOCKS, train
from tests.support.training import ROWS, Case, all_sharded, distance, plainly

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, pytest.mark.timeout(300)]

CASE = Case(dtype=torch.float32, groups=True, options={"lr": 1e-2, "weight_decay": 0.1})
HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3], ids="stage{}".format)
def test_every_tier_codec_and_precision_follows_plain_pytorch(
    nccl_ranks: Ranks, tmp_path: Path, stage: int, num_ranks: int
) -> None:
    for found in nccl_ranks.run(num_ranks, run_all, stage, str(tmp_path)):
        assert not (wrong := list(complaints(stage, found))), "\n".join(wrong)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_fp64_parameters_agree_to_1e_10(nccl_ranks: Ranks, num_ranks: int) -> None:
    cases = [Case(5, clip=0.5, groups=True), Case(4, accumulation=2)]
    for stage in (1, 2, 3) if num_ranks == 2 else (3,):
        for case, found in zip(cases, nccl_ranks.run(num_ranks, all_sharded, cases, stage)[0], strict=True):
            difference, name = distance(found, plainly(case)[0])
            assert difference < 1e-10, f"{case}, stage {stage}: {name} differs by {difference}"


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


@pytest.mark.parametrize("offload", [{}, HOST], ids=["device", "host"])
def test_a_checkpoint_of_4_nccl_ranks_loads_at_2_and_3_and_on_cpu_ranks(
    nccl_ranks: Ranks, ranks: Ranks, tmp_path: Path, offload: dict[str, Any]
) -> None:
    config = {"bf16": {"enabled": True}, **offload}
    first = Leg(3, 0, 2, CASE, config, loads=False, options={"asynchronous": True})
    saved = nccl_ranks.run(4, run_leg, first, str(tmp_path))[0]
    for pool, num_ranks in ((nccl_ranks, 2), (nccl_ranks, 3), (ranks, 2)):
        for answer in pool.run(num_ranks, run_leg, Leg(3, 2, 3, CASE, config, saves=False), str(tmp_path)):
            check_equal(answer["loaded"], saved["ended"])


def in_both_ways(cases: list[tuple[str, int]]) -> list[list[dict[str, Any]]]:
    return [[train(kind, stage, apart=apart) for apart in (True, False)] for kind, stage in cases]


def test_a_unit_of_several_groups_has_one_collective_with_the_same_bits(nccl_ranks: Ranks) -> None:
    cases = [(kind, stage) for kind in ("lora", "mixed", "three") for stage in (2, 3)]
    for answers in nccl_ranks.run(2, in_both_ways, cases):
        for case, (apart, joined) in zip(cases, answers, strict=True):
            check_equal(joined["values"], apart["values"])
            assert joined["received"] == apart["received"], case
            assert joined["calls"]["REDUCE_SCATTER"] == BLOCKS, case
            assert (joined["ops"] != apart["ops"]) == (case != ("lora", 2)), (
                case
            )  # one group trains there, and is moved
            several = joined["ops"].get("allgather_into_tensor_coalesced_", 0)
            if case == ("lora", 3):  # where frozen weights stay unsharded, one group is gathered
                assert 0 < several <= 2 * BLOCKS, case
            else:
                assert several == (2 * BLOCKS if case[1] == 3 else BLOCKS * (case[0] != "lora")), case


def steps_without_waits(stage: int, config: dict[str, Any]) -> dict[str, Any]:
    """Train while torch raises at every call that makes the host wait for the device; count what the store is asked."""
    torch.manual_seed(0)
    model = Gpt(width=64, blocks=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, **config)).engine
    mine = [share(batch, dist.get_rank(), dist.get_world_size()).cuda() for batch in batches(6, ROWS)]
    asked: list[str] = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    losses = [step(batch) for batch in mine[:3]]
    board = board_of(engine)
    board._ask = lambda call, *args: asked.append(str(args))  # type: ignore[method-assign]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses += [step(batch) for batch in mine[3:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"asked": asked, "finite": bool(torch.stack(losses).isfinite().all())}


def collectives_by_communicator(stage: int) -> list[tuple[int, int]]:
    """Return the collectives of a forward that is not trained, and of a step, on each of the two communicators."""
    torch.manual_seed(0)
    model = Gpt(width=64, blocks=8)
    config = zero(stage, shardwell={"bundle_size": 0, "gathers_take_turns": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
    mine = [share(batch, dist.get_rank(), dist.get_world_size()).cuda() for batch in batches(4, ROWS)]
    ranks = roles_of(engine).shard.rank_group

    def counted(run: Callable[[], object]) -> tuple[int, int]:
        groups = ranks.group, ranks.reduce_group
        before = [group._get_sequence_number_for_group() for group in groups]
        run()
        gathers, reductions = [
            group._get_sequence_number_for_group() - old for group, old in zip(groups, before, strict=True)
        ]
        return gathers, reductions

    def step() -> None:
        engine.backward(engine(mine[0]))
        engine.step()

    def evaluate() -> None:
        with torch.no_grad():
            engine(mine[1])

    step()
    return [counted(evaluate), counted(step)]


def test_all_gathers_take_turns_on_both_communicators_where_nothing_is_reduced(nccl_ranks: Ranks) -> None:
    for forward, step in nccl_ranks.run(2, collectives_by_communicator, 3):
        units = sum(forward)
        assert units >= 9
        assert abs(forward[0] - forward[1]) <= 1
        assert step[1] >= units + forward[1]  # a reduction of each unit, and half of the forward's all-gathers


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_host_waits_for_nothing_in_a_steady_step(nccl_ranks: Ranks, stage: int) -> None:
    for precision in ({}, {"bf16": {"enabled": True}}):
        for found in nccl_ranks.run(2, steps_without_waits, stage, {**precision, "gradient_clipping": 1.0}):
            assert found == {"asked": [], "finite": True}
