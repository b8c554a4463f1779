"""Virtual time: lanes, resources, events and workers of a simulation, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from shardwell import virtual_time
from shardwell.errors import ShardwellError
from shardwell.kernels.io import IoPart
from shardwell.memory import Event
from shardwell.memory.timing import AllOf
from shardwell.memory.virtual_streams import VirtualGate, gate, thread_event, virtual_event, virtual_stream
from shardwell.offload.disk_queue import SimulatedQueue
from shardwell.offload.staging import throttle
from shardwell.offload.worker import TimedTurns, Worker
from shardwell.virtual_time.speeds import MatmulRates, Speeds
from shardwell.virtual_time.virtual_clock import COMPUTE, DISK, DOWN, UP, UPDATE, VirtualClock

# One byte takes a second everywhere, and nothing takes time by itself: seconds are easy to follow.
ONE = Speeds(
    {"fp32": MatmulRates(((1.0, 1.0),), 2.0)},
    device_memory=1.0,
    **dict.fromkeys(("copy_up", "copy_down", "inside", "between", "host_update", "disk_read", "disk_write"), 1.0),
    **dict.fromkeys(("kernel_seconds", "launch_seconds", "inside_seconds", "between_seconds"), 0.0),
)


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    before, virtual_time.clock = virtual_time.clock, VirtualClock(ONE)
    yield virtual_time.clock
    virtual_time.clock = before


def reasons(clock: VirtualClock) -> dict[str, float]:
    found: dict[str, float] = {}
    for begin, end, reason in clock.compute.reasons(0.0, clock.compute.at):
        found[reason] = found.get(reason, 0.0) + end - begin
    return found


def test_two_streams_overlap_until_one_waits_for_the_other(clock: VirtualClock) -> None:
    copies = virtual_stream(clock, "copies")
    clock.kernel(2)
    with copies.after_current():
        clock.copy(5, is_up=True)  # from 2 to 7
    clock.kernel(3)  # beside it, from 2 to 5
    assert clock.compute.at == 5
    copies.record().wait()
    clock.kernel(1)
    assert clock.compute.at == 8
    assert reasons(clock) == {COMPUTE: 6.0, UP: 2.0}


def test_collectives_on_two_communicators_at_once_may_be_faster_than_one_after_the_other() -> None:
    for share, expected in ((1.0, 12.0), (2.0, 8.0)):
        clock = VirtualClock(replace(ONE, two_communicators=share, inside_seconds=1.0))
        virtual_time.clock = clock
        try:
            gathers, reductions = virtual_stream(clock, "gathers"), virtual_stream(clock, "reductions")
            with gathers.after_current():
                clock.move("all-gather", 4, 0, 1)  # alone, with its latency: until 5
            with reductions.after_current():
                clock.move("reduce-scatter", 6, 0, 1)  # ready at 0, beside it
                assert clock.stream.at == expected
                clock.move("reduce-scatter", 2, 0, 1)  # alone again
                assert clock.stream.at == expected + 3
        finally:
            virtual_time.clock = None


def test_a_resource_does_one_work_at_a_time_and_fills_its_gaps(clock: VirtualClock) -> None:
    one, other = virtual_stream(clock, "one"), virtual_stream(clock, "other")
    clock.kernel(10)
    with one.after_current():
        clock.copy(3, is_up=True)  # from 10 to 13
    with other.after(Event()):
        clock.copy(4, is_up=True)  # was free before: from 0 to 4
        clock.copy(8, is_up=True)  # too long for the gap from 4 to 10: from 13 to 21
        clock.copy(8, is_up=False)  # its stream is in order: from 21 to 29, on another bus
    ends = [(task.resource, task.begin, task.end) for task in clock.tasks]
    assert ends == [(COMPUTE, 0, 10), (UP, 10, 13), (UP, 0, 4), (UP, 13, 21), (DOWN, 21, 29)]


def test_an_event_is_done_at_its_time_and_the_thread_can_wait_for_it(clock: VirtualClock) -> None:
    clock.kernel(4)
    mark = virtual_event(clock)
    assert not mark.is_done
    assert not AllOf([Event(), mark]).is_done
    mark.synchronize()
    assert mark.is_done
    assert clock.thread.at == 4
    assert clock.thread.reasons(0, 4) == [(0, 4, COMPUTE)]  # what the thread waited for


def test_a_stream_begins_nothing_before_the_host_has_said_so() -> None:
    clock = VirtualClock(replace(ONE, launch_seconds=2.0))
    clock.kernel(1)
    clock.kernel(1)
    assert clock.compute.at == 5  # the second is started at 4
    assert reasons(clock) == {"host": 3.0, COMPUTE: 2.0}


def test_a_worker_takes_the_urgent_task_that_is_ready_then(clock: VirtualClock) -> None:
    worker, done = Worker("updates", turns=TimedTurns(clock)), []

    def task(name: str, size: int) -> object:
        return lambda: (done.append((name, clock.thread.at)), clock.host_work(name, size))

    first = worker.submit(task("first", 10), urgency=5)  # begins at once, and ends at 10
    clock.kernel(3)
    late = worker.submit(task("late", 1), urgency=9, after=virtual_event(clock))
    clock.kernel(4)
    urgent = worker.submit(task("urgent", 1), urgency=1, after=virtual_event(clock))
    clock.kernel(30)
    not_ready = worker.submit(task("most urgent", 1), urgency=0, after=virtual_event(clock))
    assert first.has_passed is False
    late.wait()
    assert done == [("first", 0), ("urgent", 10), ("late", 11)]
    assert clock.thread.at == 12  # the loop has waited for it
    assert urgent.has_passed
    assert not not_ready.has_passed  # its event is at 37
    not_ready.wait()
    assert clock.thread.at == 38
    assert clock.thread.reasons(0, 38)[0] == (0, 12, UPDATE)  # what the loop has waited for until then
    assert clock.thread.reasons(0, 38)[1:] == [(12, 37, COMPUTE), (37, 38, UPDATE)]


def test_permits_and_bytes_count_from_the_time_of_their_release_on(clock: VirtualClock) -> None:
    permits = gate(1)
    assert isinstance(permits, VirtualGate)
    assert permits.acquire(blocking=False)
    worker = Worker("worker", turns=TimedTurns(clock))
    bound = throttle(10)
    bound.add(8)

    def release() -> None:
        clock.host_work("work", 6)
        permits.release()
        bound.remove(8)

    worker.submit(release)
    assert not permits.acquire(blocking=False)  # at 0 it is not released yet
    bound.add(5)
    assert clock.thread.at == 6
    assert permits.acquire(blocking=False)
    with pytest.raises(ShardwellError, match="no worker will do"):
        permits.acquire()


def test_a_request_to_the_drives_ends_at_its_time(clock: VirtualClock) -> None:
    request = SimulatedQueue().submit(False, [IoPart(0, 0, 7, 0, 0)])
    assert not request.wait(0).is_done
    outcome = request.wait(1000)
    assert (outcome.is_done, outcome.seconds, clock.thread.at) == (True, 7, 7)
    assert clock.thread.reasons(0, 7) == [(0, 7, DISK)]


def test_without_gpus_updates_of_a_worker_share_the_cores_with_the_loop() -> None:
    clock = VirtualClock(ONE, has_gpus=False)
    clock.kernel(4)
    assert clock.thread.at == 4  # there is no other stream
    worker = Worker("updates", turns=TimedTurns(clock))
    worker.submit(lambda: clock.host_work("update", 5), after=thread_event(clock))
    clock.kernel(1)  # the worker has begun at 4 already, and has the cores until 9
    assert clock.thread.at == 10


def test_kernels_over_tensors_with_gaps_take_the_time_of_their_elements(clock: VirtualClock) -> None:
    clock.speeds = replace(ONE, strided_share=0.5)
    clock.kernel(8, num_strided=2)
    assert clock.compute.at == 8  # bytes take longer
    clock.kernel(8, num_strided=8)
    assert clock.compute.at == 8 + 16


def test_updates_take_longer_where_they_write_elsewhere_or_unpack_moments(clock: VirtualClock) -> None:
    clock.speeds = replace(ONE, out_of_place_share=0.5, eight_bit_share=0.25)
    clock.host_work("host update", 2)
    clock.host_work("host update", 2, out_of_place=True)
    clock.host_work("host update", 2, eight_bit=True)
    assert clock.thread.at == 2 + 4 + 8


def test_products_take_the_rate_of_their_size_and_dtype() -> None:
    rates = MatmulRates(((1e3, 1e3), (1e5, 1e5)))
    assert [rates.at(flops) for flops in (1.0, 1e3, 1e4, 1e5, 1e9)] == pytest.approx([1e3, 1e3, 1e4, 1e5, 1e5])
    speeds = replace(ONE, matmul={"bf16": rates})
    assert speeds.matmul_in("fp16") is rates
    assert speeds.matmul_in("fp64") is rates
    clock = VirtualClock(speeds)
    clock.kernel(1, flops=2e5, dtype="bf16")
    assert clock.compute.at == pytest.approx(2.0)
    clock.kernel(50, flops=1.0, dtype="bf16")  # its bytes take longer
    assert clock.compute.at == pytest.approx(52.0)


def test_a_kernel_over_both_memories_is_a_copy(clock: VirtualClock) -> None:
    here, there = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    clock.is_on_device = lambda tensor: tensor is there
    virtual_time.touch(here, there)
    virtual_time.touch(there, here)
    virtual_time.touch(here, here)
    virtual_time.touch(there, there)
    assert [(task.resource, task.num_bytes) for task in clock.tasks] == [
        (UP, 16),
        (DOWN, 16),
        (UPDATE, 32),
        (COMPUTE, 32),
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"inside": 0.0}, "inside is 0.0"), ({"launch_seconds": -1.0}, "0 or more"), ({"matmul": {}}, "expected bf16")],
)
def test_speeds_that_cannot_be_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ShardwellError, match=words):
        replace(ONE, **change)  # type: ignore[arg-type]
