"""A batch whose kernels are not loaded yet must not lock up: loading one may wait until the device is idle."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

import shardwell
from shardwell.parallel.point_to_point import PointToPoint
from shardwell.pipeline.runner import PipelineRunner
from shardwell.pipeline.schedules import Schedule, make_schedule, needs
from shardwell.pipeline.simulation import Message, own_messages
from tests.support.pipelines import chain, next_token_loss, pipeline_config, stream
from tests.support.ranks import Ranks


class Device:
    """One rank, whose host issues messages in the order of the runner, and whose device has those that are not over."""

    def __init__(self, schedule: Schedule, rank: int, *, ahead: bool) -> None:
        self.schedule, self.operations, self.ahead = schedule, schedule.ranks[rank], ahead
        self.place, self.is_posted = 0, False
        self.sent: set[Message] = set()
        self.received: set[Message] = set()

    def advance(self, others: list[Device], done: set[Any]) -> bool:
        """Do what can be done next; return whether anything could."""
        if self.place == len(self.operations):
            return False
        if not self.is_posted:
            for one in self.operations[self.place : self.place + 1 + self.ahead]:
                self.received |= own_messages(self.schedule, one)[0]
            self.is_posted = True
            return True
        sent = {message for other in others for message in other.sent}
        received = {message for other in others for message in other.received}
        one = self.operations[self.place]
        is_idle = self.received <= sent and self.sent <= received
        if not is_idle or not done.issuperset(needs(self.schedule, one)):
            return False
        self.sent |= own_messages(self.schedule, one)[1]
        done.add(one)
        self.place, self.is_posted = self.place + 1, False
        return True


def locks_up(schedule: Schedule, *, ahead: bool) -> bool:
    """Return whether no rank can go on, if each operation waits until the device has no message in flight."""
    ranks = [Device(schedule, rank, ahead=ahead) for rank in range(schedule.num_ranks)]
    done: set[Any] = set()
    while any([rank.advance(ranks, done) for rank in ranks]):  # noqa: C419 (all of them advance)
        pass
    return len(done) < len(schedule.operations)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_operations_that_need_an_idle_device_run_if_nothing_is_received_ahead(name: str) -> None:
    for num_ranks in range(2, 6):
        for number in range(1, 9):
            assert not locks_up(make_schedule(name, num_ranks, number), ahead=False), (num_ranks, number)
    assert locks_up(make_schedule(name, 2, 2), ahead=True)  # the reason for the rule


def receives_before_the_second_operation_ends() -> list[int]:
    """Train two batches in which messages would occupy the device."""
    events: list[list[str]] = []
    receive, execute = PointToPoint.receive, PipelineRunner._execute

    def noted_receive(self: PointToPoint, *args: Any) -> Any:
        events[-1].append("receive")
        return receive(self, *args)

    def noted_execute(self: PipelineRunner, *args: Any, **kwargs: Any) -> None:
        execute(self, *args, **kwargs)
        events[-1].append("end")

    with (
        mock.patch.object(PointToPoint, "receive", noted_receive),
        mock.patch.object(PipelineRunner, "_execute", noted_execute),
        mock.patch.object(PointToPoint, "waits_on_device", True),
    ):
        model = shardwell.pipeline.split(chain(), loss_fn=next_token_loss)
        engine: Any = shardwell.initialize(model=model, config=pipeline_config(1, "1f1b")).engine
        batches = stream(3, engine.data_rank)
        for _ in range(3):
            events.append([])
            if len(events) == 3:  # other shapes need other kernels
                batches = iter([(ids[:1], labels[:1]) for ids, labels in batches])
            engine.train_batch(batches)
        engine.destroy()
    return [one[: one.index("end", one.index("end") + 1)].count("receive") for one in events]


def test_a_stage_receives_ahead_only_after_a_batch_of_the_same_shapes(ranks: Ranks) -> None:
    first, _ = ranks.run(2, receives_before_the_second_operation_ends)
    assert first == [0, 1, 0]
