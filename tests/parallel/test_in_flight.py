"""The host enqueues a bounded number of collectives ahead of the device, whatever groups of ranks they are over."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch

from shardwell.memory import Device, Event, MemoryStats, TemporaryBuffers
from shardwell.parallel import Collectives
from shardwell.parallel.mesh import RankGroup
from shardwell.parallel.traffic import TrafficStats

MOST = 24


class LaneEvent(Event):
    """An event that no other stream waits for."""

    def wait(self) -> None:
        pass


class Lane:
    """A stream of a device that does nothing by itself: what the host does not wait for goes on."""

    def __init__(self, enqueued: list[Lane.Point]) -> None:
        self._enqueued = enqueued

    class Point:
        """As much of a device's event as `Event` needs."""

        def __init__(self, earlier: list[Lane.Point]) -> None:
            self.number, self._earlier, self.has_passed = len(earlier), earlier, False

        def synchronize(self) -> None:
            """The device gets here; the host waits for no later collective while an earlier one goes on."""
            assert all(one.has_passed for one in self._earlier[: self.number])
            self.has_passed = True

    @contextlib.contextmanager
    def after(self, event: Event) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def after_current(self) -> Iterator[None]:
        yield

    def record(self) -> Event:
        point: Any = Lane.Point(self._enqueued)
        self._enqueued.append(point)
        return LaneEvent(point)


def groups_of_an_engine(enqueued: list[Lane.Point]) -> list[Collectives]:
    """All 8 ranks, those of a node, and those at one place of all nodes, each with two communicators of NCCL."""
    device = Device("cpu")
    device.all_gather_stream = device.reduce_stream = Lane(enqueued)
    stats = MemoryStats()
    world = RankGroup(0, 8, 4, "nccl", is_simulated=True)
    everyone = Collectives(world, device, TrafficStats(), TemporaryBuffers(device, stats))
    node, across = RankGroup(0, 4, 4, "nccl", is_simulated=True), RankGroup(0, 2, 1, "nccl", is_simulated=True)
    return [everyone, everyone.over(node), everyone.over(across)]


def test_a_bounded_number_of_collectives_is_in_flight_over_all_groups_together() -> None:
    draw = random.Random(0)
    enqueued: list[Lane.Point] = []
    groups, most = groups_of_an_engine(enqueued), 0
    for _ in range(1000):
        group = draw.choice(groups)
        direct, numel = group.direct, 8 * draw.randint(1, 64)
        flat = torch.zeros(numel, dtype=draw.choice([torch.float32, torch.bfloat16]))
        kind = draw.randrange(4)
        if kind == 0:
            work = direct.all_gather(flat)
        elif kind == 1:
            work = direct.reduce_scatter(flat, torch.zeros(numel // group.rank_group.size), 1.0, False)
        elif kind == 2:
            work = direct.all_to_all(flat, torch.empty_like(flat))
        else:
            work = direct.all_reduce(flat, torch.zeros(numel), 1.0, False)
        work.wait()
        if draw.random() < 0.1:  # the device gets on by itself, in order
            for point in enqueued[: draw.randint(0, len(enqueued))]:
                point.has_passed = True
        most = max(most, sum(not point.has_passed for point in enqueued))
    assert most == MOST
