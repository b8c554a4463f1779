"""A batch whose kernels are not loaded yet must not lock up: loading one may wait until the device is idle."""

from __future__ import annotations

import contextlib
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.errors import ConfigError, ShardwellError
from shardwell.parallel.point_to_point import PointToPoint
from shardwell.pipeline.operations import Operation, Pass
from shardwell.pipeline.schedules import Schedule, check_schedule, make_schedule, needs
from shardwell.pipeline.simulation import Message, own_messages
from tests.support.internals import pipeline_links
from tests.support.pipelines import chain, next_token_loss, pipeline_config, stream
from tests.support.ranks import Ranks


class Device:
    """One rank, whose host issues what the runner and ZeRO issue, and whose device has what is not over.

    Before each operation its replicas have a collective, as stage 3 has all-gathers. A message of NCCL is on the device
    until both sides have issued it; one through the host is not.
    """

    def __init__(self, schedule: Schedule, rank: int, *, ahead: bool, by_host: bool) -> None:
        self.schedule, self.operations = schedule, schedule.ranks[rank]
        self.ahead, self.by_host = ahead, by_host
        self.place, self.num_collectives = 0, 0
        self.sent: set[Message] = set()
        self.received: set[Message] = set()

    def advance(self, line: list[Device], replicas: list[Device], done: set[Operation]) -> bool:
        """Do what can be done next; return whether anything could."""
        if self.place == len(self.operations):
            return False
        if self.num_collectives == self.place:
            for one in self.operations[self.place : self.place + 1 + self.ahead]:
                self.received |= own_messages(self.schedule, one)[0]
            self.num_collectives += 1
            return True
        one = self.operations[self.place]
        if not self.is_idle(line, replicas) or not done.issuperset(needs(self.schedule, one)):
            return False
        self.sent |= own_messages(self.schedule, one)[1]
        done.add(one)
        self.place += 1
        return True

    def is_idle(self, line: list[Device], replicas: list[Device]) -> bool:
        """Return whether nothing is on the device, so that an operation can load its kernels."""
        sent = {message for other in line for message in other.sent}
        received = {message for other in line for message in other.received}
        has_messages = not (self.received <= sent and self.sent <= received)
        is_ahead = any(other.num_collectives < self.num_collectives for other in replicas)
        return not is_ahead and (self.by_host or not has_messages)


def locks_up(schedule: Schedule, *, ahead: bool, by_host: bool, num_replicas: int = 2) -> bool:
    """Return whether no rank can go on, if each operation loads kernels. What can be done stays possible: any order."""
    grid = [
        [Device(schedule, rank, ahead=ahead, by_host=by_host) for rank in range(schedule.num_ranks)]
        for _ in range(num_replicas)
    ]
    done: list[set[Operation]] = [set() for _ in grid]
    has_moved = True
    while has_moved:
        has_moved = False
        for line, finished in zip(grid, done, strict=True):
            for rank, device in enumerate(line):
                has_moved |= device.advance(line, [other[rank] for other in grid], finished)
    return any(len(finished) < len(schedule.operations) for finished in done)


def sizes() -> list[Schedule]:
    """Return all schedules of up to five ranks and ten micro-batches, of three chunks at most."""
    found = []
    for name in ("gpipe", "1f1b", "zb-h1", "interleaved"):
        for num_ranks in range(2, 6):
            for number in range(1, 11):
                for chunks in (2, 3) if name == "interleaved" else (1,):
                    try:
                        found.append(make_schedule(name, num_ranks, number, chunks))
                    except ConfigError:  # micro-batches that are no equal rounds
                        continue
    return found


def drawn(seed: int) -> Schedule:
    """Return lists in an order in which they can run, drawn at random."""
    draw = random.Random(seed)
    num_ranks, chunks, number = draw.randint(2, 4), draw.randint(1, 2), draw.randint(1, 5)
    kinds = draw.choice([(Pass.FORWARD, Pass.BACKWARD), (Pass.FORWARD, Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT)])
    left = {
        Operation(stage, kind, one) for stage in range(num_ranks * chunks) for kind in kinds for one in range(number)
    }
    lists: list[list[Operation]] = [[] for _ in range(num_ranks)]
    whole = Schedule("drawn", num_ranks * chunks, number, (tuple(left),) * num_ranks)
    while left:
        ready = [one for one in sorted(left, key=str) if left.isdisjoint(needs(whole, one))]
        one = draw.choice(ready)
        left.remove(one)
        lists[one.stage % num_ranks].append(one)
    schedule = Schedule("drawn", num_ranks * chunks, number, tuple(map(tuple, lists)))
    check_schedule(schedule)
    return schedule


def test_no_schedule_locks_up_with_messages_through_the_host() -> None:
    for schedule in [*sizes(), *map(drawn, range(60))]:
        assert not locks_up(schedule, ahead=True, by_host=True), schedule


def test_messages_on_the_device_lock_up_where_kernels_are_loaded() -> None:
    """The reason for the rule, which shows that the model can fail: also if nothing is received ahead."""
    assert locks_up(make_schedule("1f1b", 2, 2), ahead=True, by_host=False)
    stuck = [one for one in sizes() if locks_up(one, ahead=False, by_host=False, num_replicas=1)]
    assert {one.name for one in stuck} == {"interleaved"}


class AsWithNccl:
    """The collectives of a pipeline, of which the stream waits for messages unless these go through the host."""

    host_drives_progress = False

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)


def trained(waits_on_device: bool) -> tuple[list[set[bool]], list[float]]:
    """Train three batches, the last one of other shapes; return by which ways messages went, and the losses."""
    routes: list[set[bool]] = []
    send = PointToPoint.send

    def noted(self: PointToPoint, *args: Any) -> None:
        routes[-1].add(self._uses_host)
        send(self, *args)

    torch.manual_seed(0)
    with mock.patch.object(PointToPoint, "send", noted), contextlib.ExitStack() as stack:
        model = shardwell.pipeline.split(chain(), loss_fn=next_token_loss)
        engine: Any = shardwell.initialize(model=model, config=pipeline_config(1, "1f1b")).engine
        if waits_on_device:
            links: Any = pipeline_links(engine)
            links._pipe, links._host_group = AsWithNccl(links._pipe), dist.new_group([0, 1], backend="gloo")
            stack.enter_context(mock.patch.object(PointToPoint, "waits_on_device", True))
        batches, losses = stream(3, engine.data_rank), []
        for number in range(3):
            routes.append(set())
            if number == 2:  # other shapes need other kernels
                batches = iter([(ids[:1], labels[:1]) for ids, labels in batches])
            losses.append(float(engine.train_batch(batches)))
        engine.destroy(whole=False)
    return routes, losses


def both_ways() -> list[tuple[list[set[bool]], list[float]]]:
    return [trained(True), trained(False)]


def test_messages_go_through_the_host_in_the_first_batch_of_their_shapes(ranks: Ranks) -> None:
    for (routes, losses), (plain, expected) in ranks.run(2, both_ways):
        assert routes == [{True}, {False}, {True}]
        assert plain == [{False}] * 3
        assert losses == expected


def failing_in_the_first_batch() -> str:
    """Let the last stage raise while the first one waits for a message through the host; return the error."""
    model = shardwell.pipeline.split(chain(), loss_fn=failing_loss)
    engine: Any = shardwell.initialize(model=model, config=pipeline_config(1, "1f1b")).engine
    links: Any = pipeline_links(engine)
    links._pipe, links._host_group = AsWithNccl(links._pipe), dist.new_group([0, 1], backend="gloo")
    with mock.patch.object(PointToPoint, "waits_on_device", True):
        try:
            engine.train_batch(stream(1, engine.data_rank))
        except (ShardwellError, ZeroDivisionError) as error:
            return str(error)
    return "nothing was raised"


def failing_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("the loss is broken on purpose")


def test_a_stage_that_fails_is_an_error_where_another_waits_for_a_message_through_the_host(ranks: Ranks) -> None:
    first, last = ranks.run(2, failing_in_the_first_batch)
    assert "the loss is broken on purpose" in last
    assert "rank 1" in first
    assert "the loss is broken on purpose" in first


@pytest.mark.parametrize(("value", "expected"), [("EAGER", False), ("LAZY", True), (None, True)])
def test_kernels_that_are_loaded_at_the_start_need_no_other_way(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool
) -> None:
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_MODULE_LOADING", value)
    pipe: Any = mock.Mock(host_drives_progress=False)
    pipe.rank_group.is_simulated = False
    links = PointToPoint.__new__(PointToPoint)
    links._pipe = pipe
    assert links.waits_on_device is expected
