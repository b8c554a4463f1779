"""What a second copy of the parameters costs and saves: bytes equal the formulas, by the books and by other counts."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwell
from shardwell.memory import StateKind, Tier
from shardwell.parallel import TrafficKind
from shardwell.parallel.mesh import smallest_node
from shardwell.parallel.traffic import BETWEEN, INSIDE
from shardwell.sharding.layout import even_part
from tests.support.adapters import Adapted
from tests.support.internals import collectives_of, finish_reduces, groups_of, traffic_so_far, units_of
from tests.support.live_bytes import live_bytes
from tests.support.models import Gpt, batches, share, zero
from tests.support.offload_cases import AIO, blocks, counted, quickly, wait_for_the_reader
from tests.support.patience import soon
from tests.support.ranks import Ranks
from tests.support.wire_counter import WireCounter

ROWS = 48
NOISE = 600  # bytes that are alive beside an engine: counters, norms, the last loss


def start(partition: int, model: nn.Module | None = None, **config: Any) -> shardwell.Engine:
    torch.manual_seed(0)
    model = model or Gpt(blocks=2)
    config = zero(3, train_micro_batch_size_per_gpu=1, **config)
    config["zero_optimization"]["zero_hpz_partition_size"] = partition
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config).engine


def micro_step(engine: shardwell.Engine, micro: int = 0, num_micro: int = 1) -> None:
    batch = share(batches(1, ROWS)[0], dist.get_rank(), dist.get_world_size(), micro, num_micro)
    engine.backward(engine(batch))


def node_of(rank: int, num_ranks: int, partition: int) -> int:
    """How many ranks a rank's node has."""
    first = rank // partition * partition
    return min(first + partition, num_ranks) - first


# ---------------------------------------------------------------------------------------------------------- traffic


def traffic_of_a_step(partition: int, accumulation: int, recompute: str, bf16: bool) -> dict[str, Any]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    engine = start(
        partition, Gpt(blocks=2, recompute=recompute), gradient_accumulation_steps=accumulation, bf16={"enabled": bf16}
    )
    counter = WireCounter(rank, num_ranks)
    in_backward: list[dict[str, int]] = []
    for step in range(2):
        if step == 1:
            counter.__enter__()
        for micro in range(accumulation):
            loss = engine(share(batches(1, ROWS)[0], rank, num_ranks, micro, accumulation))
            before = traffic_so_far(engine).received
            engine.backward(loss)
            after = traffic_so_far(engine).received
            hops = {
                hop: after.get((TrafficKind.ALL_GATHER, hop), 0) - before.get((TrafficKind.ALL_GATHER, hop), 0)
                for hop in (INSIDE, BETWEEN)
            }
            in_backward.append(hops)
            engine.step()
    counter.__exit__(None, None, None)
    report = engine.traffic()
    return {
        "padded": [group.layout.padded for group in groups_of(engine)],
        **{
            f"{kind.value} {hop}": report.received[kind, hop]
            for kind in (TrafficKind.ALL_GATHER, TrafficKind.REDUCE_SCATTER)
            for hop in HOPS
        },
        "in backward": in_backward,
        "counted": sum(counter.received.values()),
        "all": report.total() + report.total(TrafficKind.CONTROL),
    }


HOPS = (INSIDE, BETWEEN)


@pytest.mark.parametrize(
    ("num_ranks", "partition", "accumulation", "recompute", "bf16"),
    [
        (4, 2, 1, "", False),
        (4, 2, 3, "", True),
        (4, 2, 2, "reentrant", False),
        (4, 2, 1, "non-reentrant", True),
        (3, 2, 2, "reentrant", False),
        (3, 2, 1, "non-reentrant", True),
        (4, 3, 2, "", True),
        (4, 4, 2, "reentrant", False),
        (2, 8, 2, "", True),
    ],
)
def test_one_gather_a_step_leaves_the_node(
    ranks: Ranks, num_ranks: int, partition: int, accumulation: int, recompute: str, bf16: bool
) -> None:
    """The first forward takes a shard from every rank; each later gather of the step a slice from those of the node."""
    size = 2 if bf16 else 4
    for rank, answer in enumerate(ranks.run(num_ranks, traffic_of_a_step, partition, accumulation, recompute, bf16)):
        here = node_of(rank, num_ranks, partition)
        whole = sum(answer["padded"]) * size
        split = sum(even_part(padded, here) for padded in answer["padded"]) * size
        later = 2 * accumulation - 1
        assert answer["gather between"] == whole * (num_ranks - here) // num_ranks
        assert answer["gather inside"] == whole * (here - 1) // num_ranks + later * split * (here - 1) // here
        assert answer["reduce between"] == accumulation * whole * (num_ranks - here) // num_ranks
        assert answer["reduce inside"] == accumulation * whole * (here - 1) // num_ranks
        assert answer["counted"] == answer["all"]  # every byte, by a counter that does not ask the engine
        for hops in answer["in backward"]:
            assert hops[BETWEEN] == 0
            assert hops[INSIDE] == split * (here - 1) // here


def frozen_traffic() -> dict[str, Any]:
    """A unit that is frozen, and one that is in part."""
    model = nn.Sequential(Adapted().requires_grad_(False), Adapted())
    engine = start(2, model, shardwell={"keep_frozen": 0})
    found = []
    for step in range(3):
        torch.manual_seed(step)
        engine.backward(engine(torch.randn(2, 32)).square().mean())
        engine.step()
        found.append(engine.traffic().received[TrafficKind.ALL_GATHER, BETWEEN])
    groups = groups_of(engine)
    held = engine.memory().now.get((StateKind.PARAMETERS, "0", Tier.DEVICE))
    return {
        "between": found,
        "frozen": sum(group.layout.padded for group in groups if not group.trainable),
        "trained": sum(group.layout.padded for group in groups if group.trainable),
        "first": sum(group.layout.padded for group in groups if group.unit == "0"),
        "held": held,
    }


def test_what_is_frozen_leaves_the_node_once_for_all(ranks: Ranks) -> None:
    for answer in ranks.run(4, frozen_traffic):
        trained = answer["trained"] * 4 // 2
        assert answer["frozen"] > 0
        assert answer["between"] == [trained + answer["frozen"] * 4 // 2, trained, trained]
        assert answer["held"] == answer["first"] * 4 // 4 + answer["first"] * 4 // 2  # the shard, and half of a copy


def kept_whole() -> tuple[int, int]:
    engine = start(2, nn.Sequential(Adapted().requires_grad_(False), Adapted()), shardwell={"keep_frozen": 10**6})
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 32)).square().mean())
        engine.step()
    frozen = sum(group.layout.padded for group in groups_of(engine) if group.unit == "0")
    return engine.memory().by_unit()["0"], 4 * frozen


def test_what_stays_whole_has_no_second_copy(ranks: Ranks) -> None:
    for held, whole in ranks.run(4, kept_whole):
        assert held == whole > 0


def simulated(rank: int, num_ranks: int, partition: int) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024)) for _ in range(4)])
    engine = start(partition, model, bf16={"enabled": True})
    for _ in range(2):
        engine.backward(engine(torch.empty(2, 1024, device="meta")).sum())
        copies = engine.memory().total(StateKind.PARAMETERS)
        engine.step()
    report = engine.traffic()
    return {
        "padded": [group.layout.padded for group in groups_of(engine)],
        "copies": copies - engine.memory().total(StateKind.PARAMETERS),
        **{hop: report.received[TrafficKind.ALL_GATHER, hop] for hop in HOPS},
    }


@pytest.mark.parametrize(("rank", "partition", "here"), [(5, 8, 8), (1021, 24, 16)])
def test_a_rank_of_1024_in_nodes(ranks: Ranks, rank: int, partition: int, here: int) -> None:
    answer = ranks.run(1, simulated, rank, 1024, partition)[0]
    whole = 2 * sum(answer["padded"])
    assert answer[BETWEEN] == whole * (1024 - here) // 1024
    assert answer[INSIDE] == whole * (here - 1) // 1024 + whole * (here - 1) // here  # 16 divides what 1024 does
    assert answer["copies"] == whole // here


# ----------------------------------------------------------------------------------------------------------- memory


def memory_of_a_run(partition: int, bf16: bool, accumulation: int) -> dict[str, Any]:
    """At the end of a backward, by our own counting and by the books: with a second copy, and after the update."""
    found: dict[str, Any] = {}
    for name, size in (("without", 1), ("with", partition)):
        before = live_bytes()
        engine = start(size, bf16={"enabled": bf16}, gradient_accumulation_steps=accumulation)
        for micro in range(accumulation):
            micro_step(engine, micro, accumulation)
            engine.step()
        rest, rest_by_books = live_bytes() - before, engine.memory().total()
        micro_step(engine, 0, accumulation)
        finish_reduces(engine)
        found[name] = {
            "rest": rest,
            "rest by books": rest_by_books,
            "backward": live_bytes() - before,
            "by books": engine.memory().total(),
            "parameters": engine.memory().total(StateKind.PARAMETERS),
        }
        found["padded"] = [group.layout.padded for group in groups_of(engine)]
        found["shards"] = sum(group.layout.shard_numel for group in groups_of(engine))
        del engine
        assert is_soon(lambda limit=before + NOISE: live_bytes() <= limit), "an engine leaves tensors behind"
    return found


def is_soon(condition: Callable[[], bool]) -> bool:
    """Tell whether the condition holds within some seconds: a thread of torch may hold a tensor a little longer."""
    deadline = time.monotonic() + 20
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("num_ranks", "partition", "bf16"),
    [(4, 2, False), (4, 2, True), (3, 2, False), (4, 3, True), (4, 4, False), (2, 8, True)],
)
def test_memory_rises_by_a_slice_of_the_parameters_from_forward_to_update(
    ranks: Ranks, num_ranks: int, partition: int, bf16: bool
) -> None:
    size = 2 if bf16 else 4
    for rank, answer in enumerate(ranks.run(num_ranks, memory_of_a_run, partition, bf16, 2)):
        here = node_of(rank, num_ranks, partition)
        kept = sum(even_part(n, here) // here + n - even_part(n, here) for n in answer["padded"])
        if num_ranks % here == 0:
            assert kept == sum(answer["padded"]) // here  # nothing is left over
        without, with_copies = answer["without"], answer["with"]
        assert with_copies["parameters"] == 4 * answer["shards"] + size * kept
        assert with_copies["by books"] - without["by books"] == size * kept
        assert abs(with_copies["backward"] - without["backward"] - size * kept) <= NOISE
        assert with_copies["rest by books"] == without["rest by books"]
        assert abs(with_copies["rest"] - without["rest"]) <= NOISE


@pytest.mark.parametrize("numel", [0, 8, 24, 40, 1000])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 7])
def test_slices_of_a_copy_are_equal_and_aligned(numel: int, num_parts: int) -> None:
    even = even_part(numel, num_parts)
    assert even % num_parts == 0
    assert even // num_parts % 8 == 0
    assert 0 <= numel - even < 8 * num_parts


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "fewest"), [(4, 2, 2), (5, 2, 1), (5, 4, 1), (11, 4, 3), (3, 8, 3), (8, 8, 8)]
)
def test_the_last_node_may_be_the_smallest(num_ranks: int, ranks_per_node: int, fewest: int) -> None:
    assert smallest_node(num_ranks, ranks_per_node) == fewest


# ------------------------------------------------------------------------------------------------------------ drives


def reads_of_a_step(path: str, partition: int) -> dict[str, int]:
    """Bytes that a steady step of three micro-steps reads from drives."""
    quickly()
    engine = start(
        partition,
        bf16={"enabled": True},
        aio=AIO,
        gradient_accumulation_steps=3,
        zero_optimization=blocks("nvme", "nvme", path),
    )
    moved = {"read": 0, "written": 0}
    for step in range(3):
        with counted(moved if step == 2 else {}):
            for micro in range(3):
                micro_step(engine, micro, 3)
                engine.step()
            for unit in units_of(engine):
                unit.wait()
            wait_for_the_reader(engine)
    return {**moved, "shards": 2 * sum(group.layout.shard_numel for group in groups_of(engine))}


def test_parameters_on_disk_are_read_once_a_step(ranks: Ranks, tmp_path: Path) -> None:
    """Beside what updates read; without a second copy, in every forward and backward."""
    without = ranks.run(2, reads_of_a_step, str(tmp_path), 1)
    for before, after in zip(without, ranks.run(2, reads_of_a_step, str(tmp_path), 2), strict=True):
        assert before["read"] - after["read"] == (6 - 1) * after["shards"]
        assert before["written"] == after["written"]


# -------------------------------------------------------------------------------------------------------- placement


def placed(device_memory: int | str) -> dict[str, Any]:
    own = {"placement": "auto", "memory": {"device": device_memory, "host": 10**9}}
    places = blocks("cpu", "cpu", "")
    engine = start(2, Gpt(blocks=6), bf16={"enabled": True}, shardwell=own, zero_optimization=places)
    for _ in range(2):
        micro_step(engine)
        finish_reduces(engine)
        held = sum(size for (_, _, tier), size in engine.memory().now.items() if tier is Tier.DEVICE)
        engine.step()
    groups, found = groups_of(engine), engine.offload.places
    return {
        "copies": sum(2 * group.layout.padded // 2 for group in groups),
        "above": sum(place.parameters is Tier.DEVICE for place in found.values()),
        "held": held,
        "units": len(found),
        "padding": 32 * 8 * 4 * len(groups),
    }


@pytest.mark.slow
def test_placement_leaves_room_for_the_copies(ranks: Ranks) -> None:
    """With as much room as before, fewer units rest above."""
    all_above = ranks.run(4, placed, 10**9)[0]
    assert all_above["above"] == all_above["units"]
    budget = all_above["copies"] + 20_000
    for answer in ranks.run(4, placed, budget):
        assert 0 < answer["above"] < answer["units"]
        assert answer["copies"] < answer["held"] <= budget + answer["padding"]


def refused_placement() -> str:
    with pytest.raises(shardwell.ShardwellError, match="does not fit") as refused:
        placed(10_000)
    return str(refused.value)


def test_copies_that_do_not_fit_are_refused_before_anything_is_made(ranks: Ranks) -> None:
    assert "Raise shardwell.memory.device" in ranks.run(4, refused_placement)[0]


# ------------------------------------------------------------------------------------------------------------- nodes


def warnings_of(partition: int, local_world_size: int) -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwell").addHandler(handler)
    try:
        engine = start(partition)
    finally:
        logging.getLogger("shardwell").removeHandler(handler)
    mesh = collectives_of(engine).rank_group
    micro_step(engine)
    engine.step()
    return {"said": said, "node_size": mesh.node_size, "local_world_size": mesh.local_world_size}


@pytest.mark.parametrize(("partition", "warns"), [(2, False), (3, True), (4, True)])
def test_copies_that_reach_over_nodes_of_the_launcher_work_with_a_warning(
    ranks: Ranks, partition: int, warns: bool
) -> None:
    first, *others = ranks.run(4, warnings_of, partition, 2)
    assert (first["node_size"], first["local_world_size"]) == (partition, 2)
    assert len(first["said"]) == warns
    assert all("two nodes, since a node has 2" in text for text in first["said"])
    assert not any(other["said"] for other in others)


def closed() -> tuple[int, int]:
    before = len(dist.distributed_c10d._world.pg_map)
    engine = start(2)
    micro_step(engine)
    engine.step()
    during = len(dist.distributed_c10d._world.pg_map)
    engine.destroy(whole=False)
    return during - before, len(dist.distributed_c10d._world.pg_map) - before


def test_an_engine_that_is_destroyed_gives_its_connections_back(ranks: Ranks) -> None:
    for during, after in ranks.run(4, closed):
        assert (during, after) == (2, 0)


class Fails(torch.autograd.Function):
    """Lets values through, and raises in backward if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if ctx.fails:
            raise ValueError("a bad batch on this rank")
        return grad, None


class Trap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)])

    def forward(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = Fails.apply(block(x), fails and number == 1)
        return x.square().mean()


def fail_in_backward() -> dict[str, Any]:
    engine = start(2, Trap(), shardwell={"divergence_timeout": 5.0})
    engine.backward(engine(torch.ones(2, 8), False))
    engine.step()
    begin = time.monotonic()
    try:
        engine.backward(engine(torch.ones(2, 8), dist.get_rank() == 1))
        engine.step()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}
    return {"error": ""}


def test_a_rank_that_fails_wakes_those_who_wait_for_it_in_its_node(ranks: Ranks) -> None:
    answers = ranks.run(4, fail_in_backward)
    assert [answer["error"] for answer in answers] == ["PeerError", "ValueError", "PeerError", "PeerError"]
    for answer in answers:
        assert "a bad batch on this rank" in answer["text"]
        assert answer["seconds"] < soon(9)
