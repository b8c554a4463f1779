"""Several nodes: gathers and reduces in two hops give what one hop gives, and checkpoints know nothing of nodes."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.optim.lamb import Lamb
from shardwell.parallel import TrafficKind
from shardwell.parallel.mesh import RankGroup
from shardwell.sharding.gradients import Gradients
from tests.support.checkpoint_legs import Leg, run_leg
from tests.support.internals import collectives_of
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.offload_cases import HOST, PRECISIONS, check_equal
from tests.support.ranks import Ranks
from tests.support.training import Case, all_sharded, distance, plainly

CASES = [Case(clip=0.5, groups=True, accumulation=2), Case(born_sharded=True, plain_backward=True)]


def on_nodes(of: int, function: Any, *args: Any) -> Any:
    """Run something as a launcher on nodes of so many ranks would."""
    os.environ.update(LOCAL_WORLD_SIZE=str(of), LOCAL_RANK=str(dist.get_rank() % of))
    return function(*args)


def on_unlike_nodes(sizes: list[int], by_turns: bool, function: Any, *args: Any) -> Any:
    """Some nodes have more ranks than others, or ranks go round the nodes."""
    rank, first = dist.get_rank(), 0
    for size in sizes:
        if rank < first + size:
            break
        first += size
    local = rank % len(sizes) if by_turns else rank - first
    os.environ.update(LOCAL_WORLD_SIZE=str(size), LOCAL_RANK=str(local))
    return function(*args)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp64_parameters_agree_with_plain_pytorch(ranks: Ranks, stage: int) -> None:
    cases = CASES if stage == 3 else CASES[stage % 2 :][:1]
    for case, found in zip(cases, ranks.run(4, on_nodes, 2, all_sharded, cases, stage)[0], strict=True):
        difference, name = distance(found, plainly(case)[0])
        assert difference < 1e-10, f"{case}: {name} differs by {difference}"


@pytest.mark.parametrize(("num_ranks", "of"), [(4, 2), (6, 3)])
def test_shards_of_ranks_that_stand_alike_lie_side_by_side(ranks: Ranks, num_ranks: int, of: int) -> None:
    places = ranks.run(num_ranks, on_nodes, of, place)
    num_nodes = num_ranks // of
    assert sorted(places) == list(range(num_ranks))
    assert places == [rank % of * num_nodes + rank // of for rank in range(num_ranks)]


def place() -> int:
    model = Gpt()
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=zero(3))
    world = collectives_of(engine)
    assert [world.shard_index_of(rank) for rank in range(dist.get_world_size())][dist.get_rank()] == world.shard_index
    engine.destroy()
    return world.shard_index


@pytest.mark.parametrize(("sizes", "by_turns"), [([2, 1], False), ([2, 2, 2], True), ([1, 3], False)])
def test_nodes_that_are_not_alike_have_no_hops(ranks: Ranks, sizes: list[int], by_turns: bool) -> None:
    assert ranks.run(sum(sizes), on_unlike_nodes, sizes, by_turns, place) == list(range(sum(sizes)))


def gradient_bytes(block: dict[str, Any]) -> tuple[int, int]:
    """Ranks of a node, and bytes of gradients that came to this rank."""
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(3, zero_optimization=block)).engine
    for batch in batches(2, 12):
        engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()
    return collectives_of(engine).rank_group.node_size, engine.traffic().total(TrafficKind.REDUCE_SCATTER)


REDUCES, AUTO = {"zero_quantized_gradients": True}, {"zero_quantized_gradients": "auto"}
EVERYTHING = {**REDUCES, "zero_quantized_weights": True, "zero_hpz_partition_size": 2}


@pytest.mark.parametrize(
    ("sizes", "of", "block"),
    [
        ([2, 1], [2, 2, 2], REDUCES),
        ([2, 1], [2, 2, 2], AUTO),
        ([2, 1], [2, 2, 2], EVERYTHING),
        ([1, 3], [1, 1, 1, 1], REDUCES),
        ([1, 3], [1, 1, 1, 1], EVERYTHING),
        ([3], [3, 3, 3], REDUCES),
        ([1, 1], [1, 1], AUTO),
    ],
    ids=str,
)
def test_all_ranks_of_unlike_nodes_use_one_codec(
    ranks: Ranks, sizes: list[int], of: list[int], block: dict[str, Any]
) -> None:
    found = ranks.run(sum(sizes), on_unlike_nodes, sizes, False, gradient_bytes, block)
    assert len({size for _, size in found}) == 1
    assert [ranks_of_a_node for ranks_of_a_node, _ in found] == of or "zero_hpz_partition_size" in block


@pytest.mark.parametrize(("size", "of", "has"), [(4, 2, True), (4, 4, False), (4, 1, False), (6, 4, False)])
def test_two_hops_need_several_nodes_of_several_ranks(size: int, of: int, has: bool) -> None:
    assert RankGroup(0, size, of, "gloo").has_nodes is has


def whole_tensors_and_state() -> dict[str, Tensor]:
    """An optimizer that needs tensors whole, and what somebody reads of masters and state."""
    torch.manual_seed(0)
    model = Gpt()
    engine, *_ = shardwell.initialize(model=model, optimizer=Lamb(model.parameters(), lr=1e-2), config=zero(3))
    for batch in batches(3, 4):
        engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()
    weight = model.blocks[0].up.weight
    found = {"state": shardwell.utils.safe_get_full_optimizer_state(weight, "exp_avg")}
    shardwell.utils.safe_set_full_fp32_param(weight, shardwell.utils.safe_get_full_fp32_param(weight) * 2)
    return {**found, **whole_parameters(model)}


def test_whoever_needs_whole_tensors_gets_them(ranks: Ranks) -> None:
    one = ranks.run(4, on_nodes, 4, whole_tensors_and_state)[0]
    two = ranks.run(4, on_nodes, 2, whole_tensors_and_state)[0]
    for name, value in one.items():
        if name.endswith("qkv.bias"):
            continue  # the gradient of a key bias is rounding noise
        torch.testing.assert_close(torch.as_tensor(two[name]), torch.as_tensor(value), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("block", [{}, HOST], ids=["device", "host"])
def test_checkpoints_know_nothing_of_nodes(ranks: Ranks, tmp_path: Path, block: dict[str, Any]) -> None:
    case, root = Case(dtype=torch.float32), str(tmp_path)
    config = {**PRECISIONS["bf16"], "zero_optimization": block}
    saved = ranks.run(4, on_nodes, 2, run_leg, Leg(3, 0, 2, case, config, loads=False), root)[0]["ended"]
    for num_ranks, of, stage in ((4, 4, 3), (2, 2, 1)) if block else ((6, 3, 2),):
        leg = Leg(stage, 2, 2, case, config, saves=False)
        check_equal(ranks.run(num_ranks, on_nodes, of, run_leg, leg, root)[0]["loaded"], saved)


def events(block: dict[str, Any]) -> list[str]:
    """When reduces begin, go on to their second hop, and are waited for, in one step."""
    torch.manual_seed(0)
    model, found = Gpt(blocks=4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(3, zero_optimization=block)).engine
    data = batches(2, 8)
    engine.backward(engine(data[0]))
    engine.step()
    with contextlib.ExitStack() as patches:
        for name in ("reduce_scatter", "start_next_hop", "finish"):
            before = getattr(Gradients, name)

            def call(gradients: Gradients, *args: Any, before: Any = before, name: str = name, **kwargs: Any) -> Any:
                is_on_its_way = gradients._pending is not None
                answer = before(gradients, *args, **kwargs)
                if {"reduce_scatter": True, "start_next_hop": answer, "finish": is_on_its_way}[name]:
                    found.append(f"{name} {gradients.bucket.unit}")
                return answer

            patches.enter_context(patch.object(Gradients, name, call))
        engine.backward(engine(data[1]))
    return found


@pytest.mark.parametrize("coded", [False, True])
def test_the_second_hop_of_a_reduce_goes_on_beside_the_next_unit(ranks: Ranks, coded: bool) -> None:
    for found in ranks.run(4, on_nodes, 2, events, {"zero_quantized_gradients": coded}):
        assert [one for one in found if "blocks.2" in one or "blocks.1" in one or "blocks.0" in one][:6] == [
            "reduce_scatter blocks.2",
            "start_next_hop blocks.2",
            "reduce_scatter blocks.1",
            "start_next_hop blocks.1",
            "finish blocks.2",
            "reduce_scatter blocks.0",
        ]


class Chooser(nn.Module):
    """A head of the root's own that some ranks use; it is as large as a block, so that mixed-up parts would fit."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)])
        self.head = nn.Parameter(torch.randn(width, width) * 0.1)

    def forward(self, x: Tensor, with_head: bool) -> Tensor:
        x = x * self.before
        for block in self.blocks:
            x = x + block(x)
        return (x @ self.head if with_head else x).square().mean()


def chosen(engine: Any, stage: int, parts: list[int], num_ranks: int) -> None:
    """Micro-steps in which the first half of the ranks use the head."""
    for step, micro in itertools.product(range(3), range(2)):
        for rank in parts:
            data = torch.randn(2, 32, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            loss = engine(data, rank < num_ranks // 2)
            engine.backward(loss) if stage >= 0 else (loss / (2 * num_ranks)).backward()
        if stage >= 0:
            engine.step()
        elif micro:
            for parameter in engine.parameters():
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None


def sharded_choosers(stage: int, block: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Chooser()
    config = zero(stage, zero_optimization=block, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
    chosen(engine, stage, [dist.get_rank()], dist.get_world_size())
    return whole_parameters(model)


@pytest.mark.parametrize("block", [{}, {"zero_quantized_gradients": True}], ids=["numbers", "codes"])
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_may_use_different_parameters_of_a_unit(ranks: Ranks, stage: int, block: dict[str, Any]) -> None:
    """The head's gradient finds the reduce of the micro-step before on its way, on some ranks."""
    torch.manual_seed(0)
    plain = Chooser()
    chosen(plain, -1, list(range(4)), 4)
    for found in ranks.run(4, on_nodes, 2, sharded_choosers, stage, block):
        for name, value in plain.named_parameters():
            off = (torch.as_tensor(found[name]) - value).abs().max()
            assert off < (1e-2 if block else 1e-6), f"{name} differs by {off}"
