"""A unit has one collective in each direction, whatever groups it has, with the bits of one for each group."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwell.errors import ShardwellError
from shardwell.memory import Event
from shardwell.parallel.joined import JoinedWork
from shardwell.parallel.torch_transport import ALL_GATHER, REDUCE_SCATTER, one_launch
from tests.support.faults import fault_at
from tests.support.library_route import take_the_route
from tests.support.ranks import Ranks
from tests.support.several_groups import BLOCKS, engine_of, make, rows, train
from tests.support.wire_counter import WireCounter

Pair = tuple[dict[str, Any], dict[str, Any]]
KINDS = ("lora", "mixed", "three")


def both(cases: list[tuple[str, int, dict[str, Any]]], ranks_per_node: int = 0) -> list[Pair]:
    """Trained with a collective for each group, and with one for each unit."""
    if ranks_per_node:
        take_the_route(ranks_per_node)
    return [
        (train(kind, stage, apart=True, **block), train(kind, stage, apart=False, **block))
        for kind, stage, block in cases
    ]


def same_bits_and_bytes(apart: dict[str, Any], joined: dict[str, Any]) -> None:
    for name, values in apart["values"].items():
        assert (values == joined["values"][name]).all(), name
    assert joined["received"] == apart["received"]
    assert joined["wire"] == apart["wire"]


CASES = [(kind, stage, {}) for kind in KINDS for stage in (0, 1, 2, 3)]
GATHERED = {"lora": 2, "mixed": 2, "three": 3}  # groups of a block
TRAINED = {"lora": 1, "mixed": 2, "three": 2}


@pytest.mark.slow
def test_a_unit_of_several_groups_has_one_collective_in_each_direction(ranks: Ranks) -> None:
    for answers in ranks.run(2, both, CASES):
        for (kind, stage, _), (apart, joined) in zip(CASES, answers, strict=True):
            same_bits_and_bytes(apart, joined)
            passes = 2 if stage == 3 else 0  # forward and backward
            assert apart["calls"]["ALL_GATHER"] == passes * BLOCKS * GATHERED[kind]
            assert joined["calls"]["ALL_GATHER"] == passes * BLOCKS
            assert apart["calls"]["REDUCE_SCATTER"] == BLOCKS * TRAINED[kind]
            assert joined["calls"]["REDUCE_SCATTER"] == BLOCKS
            if stage < 3:
                assert apart["calls"]["PUBLISH"] == BLOCKS * TRAINED[kind]
                assert joined["calls"]["PUBLISH"] == BLOCKS
            saved = sum(apart["calls"].values()) - sum(joined["calls"].values())
            assert apart["announced"] - joined["announced"] == saved
            assert joined["trace"].count("R") == BLOCKS


HOST = {"offload_optimizer": {"device": "cpu"}}
HOPS: list[tuple[str, int, dict[str, Any]]] = [  # what takes several hops, or codes, on both routes
    ("three", 3, {"zero_hpz_partition_size": 2}),
    ("three", 3, {"zero_quantized_weights": True, "zero_quantized_gradients": True}),
    ("mixed", 2, {"replicas": 2, "steps": 2}),
]
ROUTES = {  # by ranks of a node on the device's route; plain collectives on the host's are above
    0: [
        *HOPS,
        ("mixed", 2, {"steps": 2, **HOST}),
        ("three", 3, {"steps": 2, **HOST, "offload_param": {"device": "cpu"}}),
        ("lora", 3, {"zero_quantized_nontrainable_weights": True}),
    ],
    2: [
        *HOPS,
        ("mixed", 0, {}),
        ("three", 2, {}),
        ("three", 3, {}),
        ("lora", 3, {"zero_quantized_nontrainable_weights": True, "zero_hpz_partition_size": 2}),
    ],
}


@pytest.mark.slow
def test_nodes_codecs_and_secondary_shards_keep_their_bits(ranks: Ranks) -> None:
    """On both routes: the host starts what follows a hop, or the device does."""
    for ranks_per_node, cases in ROUTES.items():
        for answers in ranks.run(4, both, cases, ranks_per_node):
            for (kind, stage, block), (apart, joined) in zip(cases, answers, strict=True):
                same_bits_and_bytes(apart, joined)
                gathers = joined["calls"]["ALL_GATHER"]
                assert gathers < apart["calls"]["ALL_GATHER"] or stage < 3, (kind, block, gathers)
                assert joined["announced"] < apart["announced"], (kind, block)


def several_at_once() -> dict[str, Any]:
    """Collectives of torch for tensors of two dtypes, in place, each alone and all at once."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    found: dict[str, Any] = {}
    for way in ("alone", "at once"):
        flats = [torch.zeros(4 * size), torch.zeros(3 * size, dtype=torch.bfloat16)]
        sums = [torch.arange(4.0 * size) + rank, torch.arange(2.0 * size, dtype=torch.float64) * (rank + 1)]
        own = [flat.chunk(size)[rank].add_(rank + 1) for flat in flats]
        outs = [one.chunk(size)[rank] for one in sums]
        counter = WireCounter(rank, size)
        with counter:
            for gathers, collective in ((True, ALL_GATHER), (False, REDUCE_SCATTER)):
                args = zip(flats, own, strict=True) if gathers else zip(outs, sums, strict=True)
                moves = [(collective, *pair) for pair in args]
                for work in one_launch(moves, group, torch.device("cpu"), is_nccl=way == "at once"):
                    work.wait()
        values = [tensor.double() for tensor in (*flats, *outs)]
        found[way] = {"values": values, "ops": dict(counter.calls), "wire": sum(counter.received.values())}
    return found


def test_torch_starts_several_tensors_as_one_collective(ranks: Ranks) -> None:
    for found in ranks.run(2, several_at_once):
        alone, at_once = found["alone"], found["at once"]
        assert all((a == b).all() for a, b in zip(alone["values"], at_once["values"], strict=True))
        assert at_once["wire"] == alone["wire"]
        assert alone["ops"] == {"_allgather_base_": 2, "_reduce_scatter_base_": 2}
        assert at_once["ops"] == {"allgather_into_tensor_coalesced_": 1, "reduce_scatter_tensor_coalesced_": 1}


class Coalescing:
    """As much of a process group as NCCL's groups of collectives need; it notes what happens between begin and end."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.events.append("begin")

    def _end_coalescing(self, device: torch.device) -> Coalescing:
        self.events.append("end")
        return self


def test_collectives_of_several_kinds_are_one_group_of_nccl_which_ends_whatever_happens() -> None:
    group, device = Coalescing(), torch.device("cpu")

    def one(name: str, *, group: Coalescing, async_op: bool) -> None:
        assert async_op
        group.events.append(name)

    def other(name: str, *, group: Coalescing, async_op: bool) -> None:
        one(name, group=group, async_op=async_op)
        raise RuntimeError("a communicator is broken")

    works = one_launch([(one, "first"), (one, "second")], group, device, is_nccl=True)
    assert works == [group]
    assert group.events == ["begin", "first", "second", "end"]
    group.events.clear()
    with pytest.raises(RuntimeError, match="broken"):
        one_launch([(one, "first"), (other, "second"), (one, "third")], group, device, is_nccl=True)
    assert group.events == ["begin", "first", "second", "end"]


def test_what_follows_a_part_that_was_never_started_does_not_run() -> None:
    followed: list[str] = []
    part = JoinedWork()
    part.enqueue(Event).then(lambda: followed.append("filled"))
    for _ in range(2):
        with pytest.raises(ShardwellError, match="never started"):
            part.wait()
    assert followed == []


class Fault(Exception):  # noqa: N818
    """What nobody expects."""


def fail_between(point: str) -> list[str]:
    """The words of the error if rank 1 fails at the second group of a unit, and a trace of the next engine."""
    engine = make("three", 3, apart=False)
    engine.backward(engine(rows(0)))
    engine.step()
    number = itertools.count(1)

    def fail(function: Any, *args: Any, **kwargs: Any) -> Any:
        if next(number) == 2 and dist.get_rank() == 1:
            raise Fault("between two groups")
        return function(*args, **kwargs)

    found = []
    try:
        with fault_at(point, fail):
            engine.backward(engine(rows(1)))
            engine.step()
    except (Fault, ShardwellError) as error:
        found.append(f"{type(error).__name__}: {error}")
    again = engine_of(engine.module, 3)  # all ranks had the error: they go on with the values of the last step
    with again.record() as trace:
        again.backward(again(rows(2)))
        again.step()
    return [*found, str(trace).split("\n")[0]]


@pytest.mark.parametrize("point", ["all-gather of a group", "reduce-scatter of a group"])
def test_a_rank_that_fails_between_two_groups_takes_the_others_with_it(ranks: Ranks, point: str) -> None:
    first, second = ranks.run(2, fail_between, point)
    assert second[0] == "Fault: between two groups"
    assert first[0].startswith("PeerError: rank 1 failed first")
    assert "between two groups" in first[0]
    assert first[1] == second[1]
    assert first[1].count("R") == BLOCKS
