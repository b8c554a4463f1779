"""Schedules are lists: equal to torch's where it has them, with the bubbles and the memory of the papers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given
from hypothesis import strategies as st

from shardwell.errors import ConfigError, ShardwellError
from shardwell.pipeline.operations import Operation, Pass
from shardwell.pipeline.schedules import SCHEDULES, Schedule, check_schedule, make_schedule, read_schedule
from shardwell.pipeline.simulation import Costs, messages, most_in_flight, simulate

RANKS, MICRO_BATCHES = range(1, 9), range(1, 33)


def every(name: str) -> Iterator[Schedule]:
    """Yield the schedule for all sizes that it has."""
    for ranks in RANKS:
        for micro_batches in MICRO_BATCHES:
            for chunks in (1, 2, 3) if name == "interleaved" else (1,):
                if name != "interleaved" or micro_batches % max(1, micro_batches // ranks) == 0:
                    yield make_schedule(name, ranks, micro_batches, chunks)


class RecordingStage:
    """A stage for torch's schedules that records what they ask of it, and computes and sends nothing."""

    is_last = False
    has_backward = True

    def __init__(self, index: int) -> None:
        self.stage_index = index
        self.record: list[str] = []

    def forward_one_chunk(self, number: int, *_args: Any, **_kwargs: Any) -> None:
        self.record.append(f"{self.stage_index}F{number}")

    def backward_one_chunk(self, number: int, **_kwargs: Any) -> None:
        self.record.append(f"{self.stage_index}B{number}")

    def __getattr__(self, name: str) -> Any:
        return lambda *args: []  # sends, receives and what comes after the last micro-batch


def of_torch(name: str, ranks: int, micro_batches: int, chunks: int) -> list[list[Any]]:
    """Return what torch's own schedule does on each rank: recorded, or from the function that computes its list."""
    classes = {
        "gpipe": torch_schedules.ScheduleGPipe,
        "1f1b": torch_schedules.Schedule1F1B,
        "interleaved": torch_schedules.ScheduleInterleaved1F1B,
        "zb-h1": torch_schedules.ScheduleInterleavedZeroBubble,
    }
    lists = []
    for rank in range(ranks):
        one: Any = object.__new__(classes[name])
        one._n_microbatches, one._num_stages, one.pp_group_size = micro_batches, ranks, ranks
        if name in ("gpipe", "1f1b"):
            one._stage, one._loss_fn, one._internal_losses, one.scale_grads = RecordingStage(rank), None, [], False
            one._has_backward = one._stage_forward_initialized = one._stage_backward_initialized = True
            one._initialize_stage = lambda *args: None
            one._step_microbatches()
            lists.append(one._stage.record)
        else:
            one.n_local_stages, rounds = chunks, max(1, micro_batches // ranks)
            one.microbatches_per_round = micro_batches // rounds
            lists.append(one._calculate_single_rank_operations(rank))
    return lists


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_lists_equal_those_of_torch(name: str) -> None:
    for ours in every(name):
        if name == "zb-h1" and ours.num_micro_batches % max(1, ours.num_micro_batches // ours.num_ranks):
            continue  # torch refuses these
        theirs = of_torch(name, ours.num_ranks, ours.num_micro_batches, ours.num_chunks)
        assert read_schedule(theirs).ranks == ours.ranks


def theory(schedule: Schedule, costs: Costs) -> float:
    """Return the bubble of the papers; with fewer micro-batches than ranks, by when the first one comes back."""
    ranks, number, chunks = schedule.num_ranks, schedule.num_micro_batches, schedule.num_chunks
    if schedule.name == "zb-h1":
        f, i, w = costs.forward, costs.backward_input, costs.backward_weight
        idle = (ranks - 1) * (f + i - w) if number >= ranks else (ranks - 1) * (f + i) - (number - 1) * w
        return idle / (idle + number * (f + i + w))
    if number >= ranks:
        return (ranks - 1) / (chunks * number + ranks - 1)
    return 1 - chunks * number / (chunks * ranks + number - 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("costs", [Costs(), Costs(1.0, 1.25, 0.75)], ids=["even", "uneven"])
def test_bubbles_equal_theory(name: str, costs: Costs) -> None:
    for schedule in every(name):
        assert simulate(schedule, costs).bubble() == pytest.approx(theory(schedule, costs), abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_forwards_in_flight_are_bounded(name: str) -> None:
    for schedule in every(name):
        ranks, number, chunks = schedule.num_ranks, schedule.num_micro_batches, schedule.num_chunks
        per_round = number // max(1, number // ranks)
        for rank in range(ranks):
            bound = {
                "gpipe": number,
                "1f1b": ranks - rank,
                "zb-h1": ranks,
                "interleaved": 2 * (ranks - 1 - rank) + (chunks - 1) * per_round + 1,
            }[name]
            assert most_in_flight(schedule, rank) == min(bound, chunks * number)


@given(st.sampled_from(SCHEDULES), st.integers(2, 8), st.integers(1, 32), st.integers(1, 4))
def test_both_sides_of_a_channel_have_the_same_order(name: str, ranks: int, number: int, chunks: int) -> None:
    chunks = chunks if name == "interleaved" else 1
    if name == "interleaved":
        number = max(1, number // ranks) * ranks
    schedule = make_schedule(name, ranks, number, chunks)
    sides = [messages(schedule, rank) for rank in range(ranks)]
    for rank, (sent, _) in enumerate(sides):
        for (source, target, way), order in sent.items():
            assert source == rank
            assert sides[target][1][source, target, way] == order
    assert sum(len(order) for sent, _ in sides for order in sent.values()) == 2 * number * (schedule.num_stages - 1)


def test_texts_are_read_and_written() -> None:
    schedule = make_schedule("zb-h1", 2, 3)
    assert str(schedule).splitlines()[1] == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    assert read_schedule([line.split() for line in str(schedule).splitlines()]).ranks == schedule.ranks
    assert Operation.parse("12W7") == Operation(12, Pass.BACKWARD_WEIGHT, 7)
    assert make_schedule("1f1b", 2, 2).last_gradients == {Operation.parse("0B1"), Operation.parse("1B1")}


def test_lists_with_torch_s_communication_are_read() -> None:
    lists = [["0UNSHARD", "0F0", "0SEND_F0", None, "0RECV_B0", "0B0"], ["1RECV_F0", "(1F0;1B0)OVERLAP_F_B"]]
    assert str(read_schedule(lists)) == "0F0 0B0\n1F0 1B0"


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ([["0F0", "0B0"], ["1B0", "1F0"]], "cannot run"),
        ([["0F0", "0B0"], ["1F0"]], "stage 1 has 1 forwards and 0"),
        ([["0F0", "0B0", "1F0", "1B0"], []], "1F0 is in the list of rank 0"),
        ([["0F0", "0I0"], ["1F0", "1B0"]], "stage 0 has 1 forwards"),
        ([["0F0", "0B0", "2F0", "2B0"], ["1F0", "1B0"]], "3 stages on 2 ranks"),
        ([["0X0"]], "'0X0' is no operation"),
        ([[]], "at least one operation"),
    ],
)
def test_lists_that_cannot_run_are_refused(lists: list[list[str]], words: str) -> None:
    with pytest.raises(ShardwellError, match=words):
        read_schedule(lists)


def test_schedules_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of gpipe, 1f1b, interleaved, zb-h1, found 'dual'"):
        make_schedule("dual", 2, 2)
    with pytest.raises(ConfigError, match="2 chunks per rank need the schedule 'interleaved'"):
        make_schedule("1f1b", 2, 2, 2)
    with pytest.raises(ConfigError, match="are not 2 equal rounds"):
        make_schedule("interleaved", 2, 5, 2)


def test_generated_schedules_pass_the_check() -> None:
    for name in SCHEDULES:
        for schedule in every(name):
            if schedule.num_micro_batches % 5 == 1:
                check_schedule(schedule)
