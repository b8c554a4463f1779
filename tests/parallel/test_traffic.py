"""Bytes on the wire equal the formula exactly, and an independent counter agrees with the ledger."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.engine import TraceAction
from shardwell.parallel import TrafficKind
from shardwell.parallel.traffic import BETWEEN, INSIDE, PAYLOAD
from tests.support.internals import groups_of, units_of
from tests.support.models import Gpt, batches, share, zero
from tests.support.ranks import Ranks
from tests.support.wire_counter import WireCounter


def traffic_of_a_step(
    stage: int, accumulation: int, recompute: str = "", bf16: bool = False, **zero_keys: Any
) -> dict[str, Any]:
    """The second step's bytes, by the ledger and by the independent counter."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Gpt(recompute=recompute)
    config = zero(stage, gradient_accumulation_steps=accumulation, train_micro_batch_size_per_gpu=1)
    config["zero_optimization"].update(zero_keys)
    config["bf16"] = {"enabled": bf16}
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    counter = WireCounter(rank, num_ranks)
    for step, batch in enumerate(batches(2, 24)):
        if step == 1:
            counter.__enter__()
        with engine.record() as trace:
            for micro in range(accumulation):
                engine.backward(engine(share(batch, rank, num_ranks, micro, accumulation)))
                engine.step()
    counter.__exit__(None, None, None)
    groups = groups_of(engine)
    report = engine.traffic()
    return {
        "payload": report.total(),
        "control": report.total(TrafficKind.CONTROL),
        "counted": sum(counter.received.values()),
        "padded": sum(group.layout.padded for group in groups),
        "padded_released": sum(group.layout.padded for group in groups if group.spec.reshards),
        "numel": sum(group.layout.numel for group in groups),
        "parameters": len(list(model.parameters())),
        "gathers": trace.count(TraceAction.ALL_GATHER),
        "units": len(engine.units),
        "pad_per_group": max(group.layout.padded - group.layout.numel for group in groups),
    }


VOLUME = {0: lambda g: 2, 1: lambda g: 2, 2: lambda g: g + 1, 3: lambda g: 3 * g}


@pytest.mark.parametrize(("num_ranks", "accumulation"), [(2, 3), (3, 1)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_payload_equals_the_formula(ranks: Ranks, stage: int, num_ranks: int, accumulation: int) -> None:
    for answer in ranks.run(num_ranks, traffic_of_a_step, stage, accumulation):
        per_rank = answer["padded"] * 4 * (num_ranks - 1) // num_ranks
        assert answer["payload"] == VOLUME[stage](accumulation) * per_rank
        assert answer["counted"] == answer["payload"] + answer["control"]
        # the norm, a checksum of the rates, and for each parameter whether it got a gradient
        assert answer["control"] == 2 * 8 * (2 + answer["parameters"]) * (num_ranks - 1)
        assert answer["pad_per_group"] < 8 * num_ranks


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_recomputation_causes_no_third_gather(ranks: Ranks, recompute: str) -> None:
    for answer in ranks.run(2, traffic_of_a_step, 3, 1, recompute):
        assert answer["gathers"] == 2 * answer["units"]
        assert answer["payload"] == 3 * answer["padded"] * 4 // 2
        assert answer["counted"] == answer["payload"] + answer["control"]


@pytest.mark.parametrize(("stage", "elements"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_bf16_moves_two_bytes_an_element(ranks: Ranks, stage: int, elements: int) -> None:
    for answer in ranks.run(2, traffic_of_a_step, stage, 1, "", True):
        assert answer["payload"] == elements * answer["padded"] * 2 // 2
        assert answer["counted"] == answer["payload"] + answer["control"]


def test_bf16_accumulated_locally_is_reduced_in_fp32(ranks: Ranks) -> None:
    for answer in ranks.run(2, traffic_of_a_step, 1, 4, "", True):
        assert answer["payload"] == answer["padded"] * (4 + 2) // 2


def test_persistent_parameters_follow_stage_2(ranks: Ranks) -> None:
    for answer in ranks.run(2, traffic_of_a_step, 3, 2, stage3_param_persistence_threshold=100):
        released, persistent = answer["padded_released"], answer["padded"] - answer["padded_released"]
        assert 0 < persistent < released
        assert answer["payload"] == (3 * 2 * released + (2 + 1) * persistent) * 4 // 2


def test_reuse_distance_saves_the_second_gather(ranks: Ranks) -> None:
    for answer in ranks.run(2, traffic_of_a_step, 3, 1, stage3_max_reuse_distance=1_000_000):
        assert answer["payload"] == 2 * answer["padded"] * 4 // 2


HOPS = (INSIDE, BETWEEN)


def traffic_over_two_nodes(stage: int, bf16: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))  # as a launcher on two nodes of two ranks says
    model = Gpt()
    config = zero(stage, bf16={"enabled": bf16})
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    engine.backward(engine(share(batches(1, 4)[0], rank, dist.get_world_size())))
    engine.step()
    for unit in units_of(engine):
        unit.wait()
    received = engine.traffic().received
    found = {hop: sum(size for (kind, h), size in received.items() if h == hop and kind in PAYLOAD) for hop in HOPS}
    return {**found, "padded": sum(group.layout.padded for group in groups_of(engine))}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("stage", "moves"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_what_enters_a_node_enters_it_once(ranks: Ranks, stage: int, moves: int, bf16: bool) -> None:
    """Half of the elements rest in the other node. Each of the two ranks of a node brings half of those."""
    answers = ranks.run(4, traffic_over_two_nodes, stage, bf16)
    for one, other in (answers[:2], answers[2:]):
        whole = one["padded"] * (2 if bf16 else 4)
        assert one[BETWEEN] + other[BETWEEN] == moves * whole // 2
        assert one[INSIDE] == other[INSIDE] == moves * whole // 2


def test_one_rank_moves_nothing(ranks: Ranks) -> None:
    assert ranks.run(1, traffic_of_a_step, 3, 1)[0]["payload"] == 0
