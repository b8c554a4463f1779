"""The simulation of a schedule: when each operation runs, how long ranks are idle, and what is in flight.

It knows costs and no tensors. The order of messages that it derives is the one in which the runner sends and receives.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

from shardwell.pipeline.operations import Operation, Pass
from shardwell.pipeline.schedules import Schedule, needs


class OperationTimes(Protocol):
    """The times that operations and messages take."""

    def end_of(self, one: Operation, begin: float) -> float:
        """Return when an operation ends that begins at a time."""

    def message_to(self, one: Operation) -> float:
        """Return the seconds that what an operation reads is under way between two ranks."""


@dataclass(frozen=True)
class Costs:
    """The seconds that one chunk of the model takes for one micro-batch, and a message between two stages."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    message: float = 0.0

    def of(self, kind: Pass) -> float:
        """Return the seconds of an operation."""
        return {
            Pass.FORWARD: self.forward,
            Pass.BACKWARD: self.backward_input + self.backward_weight,
            Pass.BACKWARD_INPUT: self.backward_input,
            Pass.BACKWARD_WEIGHT: self.backward_weight,
        }[kind]

    def end_of(self, one: Operation, begin: float) -> float:
        """Return when an operation ends that begins at a time."""
        return begin + self.of(one.kind)

    def message_to(self, one: Operation) -> float:
        """Return the seconds of a message."""
        return self.message


@dataclass(frozen=True)
class Simulated:
    """The times at which each operation begins and ends."""

    schedule: Schedule
    spans: dict[Operation, tuple[float, float]]

    @property
    def seconds(self) -> float:
        """The time from the first operation to the end of the last."""
        return max(end for _, end in self.spans.values())

    def busy(self, rank: int) -> float:
        """Return the seconds that a rank computes."""
        return sum(end - start for start, end in (self.spans[one] for one in self.schedule.ranks[rank]))

    def bubble(self, rank: int | None = None) -> float:
        """Return the share of the time in which a rank is idle; by default of the rank that computes most."""
        ranks = range(self.schedule.num_ranks) if rank is None else [rank]
        return 1.0 - max(self.busy(number) for number in ranks) / self.seconds

    def timeline(self, width: int = 100) -> str:
        """Return one line per rank in which each operation's micro-batch stands at the time at which it runs."""
        scale, lines = width / self.seconds, []
        for number, rank in enumerate(self.schedule.ranks):
            line = [" "] * width
            for one in rank:
                start, end = (int(time * scale) for time in self.spans[one])
                line[start:end] = f"{one}".ljust(end - start, "-")[: end - start]
            lines.append(f"{number}|{''.join(line)}|")
        return "\n".join(lines)


def simulate(schedule: Schedule, costs: OperationTimes | None = None) -> Simulated:
    """Run a schedule on paper: each rank does its operations in order, each as soon as what it reads is there.

    The messages of a channel come one after the other.
    """
    costs = costs or Costs()
    spans: dict[Operation, tuple[float, float]] = {}
    arrived: defaultdict[tuple[int, int, bool], float] = defaultdict(float)  # the last message of each channel
    clocks, next_of = [0.0] * schedule.num_ranks, [0] * schedule.num_ranks
    left = sum(map(len, schedule.ranks))
    while left:
        before = left
        for number, rank in enumerate(schedule.ranks):
            while next_of[number] < len(rank):
                one = rank[next_of[number]]
                inputs = needs(schedule, one)
                if not all(other in spans for other in inputs):
                    break
                start = clocks[number]
                for other in inputs:
                    ready = spans[other][1]
                    if other.stage != one.stage and schedule.num_ranks > 1:
                        channel = schedule.rank_of(other.stage), number, one.kind is Pass.FORWARD
                        ready = arrived[channel] = max(ready, arrived[channel]) + costs.message_to(one)
                    start = max(start, ready)
                clocks[number] = costs.end_of(one, start)
                spans[one] = start, clocks[number]
                next_of[number] += 1
                left -= 1
        assert left < before, "check_schedule has accepted a schedule that cannot run"
    return Simulated(schedule, spans)


def most_in_flight(schedule: Schedule, rank: int) -> int:
    """Return how many forwards of a rank have, at most, not had the whole of their backward yet."""
    last = Pass.BACKWARD_WEIGHT if schedule.splits_backward else Pass.BACKWARD
    most = now = 0
    for one in schedule.ranks[rank]:
        now += (one.kind is Pass.FORWARD) - (one.kind is last)
        most = max(most, now)
    return most


Message = tuple[Pass, int, int]  # FORWARD or BACKWARD, the stage that receives it, the micro-batch
Channel = tuple[int, int, Pass]  # the sending and the receiving rank, and FORWARD or BACKWARD


def messages(schedule: Schedule, rank: int) -> tuple[dict[Channel, list[Message]], dict[Channel, list[Message]]]:
    """Return what a rank sends and what it receives, in its own order, by channel."""
    sent: defaultdict[Channel, list[Message]] = defaultdict(list)
    received: defaultdict[Channel, list[Message]] = defaultdict(list)
    for one in schedule.ranks[rank]:
        incoming, outgoing = own_messages(schedule, one)
        for way, stage, number in incoming:
            source = schedule.rank_of(stage - (1 if way is Pass.FORWARD else -1))
            received[source, rank, way].append((way, stage, number))
        for way, stage, number in outgoing:
            sent[rank, schedule.rank_of(stage), way].append((way, stage, number))
    return dict(sent), dict(received)


def own_messages(schedule: Schedule, one: Operation) -> tuple[set[Message], set[Message]]:
    """Return what an operation needs from another rank, and what it sends to one: a message each, or nothing.

    Stages on the same rank (a pipeline of one rank with several chunks) need no message.
    """
    stage, kind, number = one
    if kind is Pass.BACKWARD_WEIGHT:
        return set(), set()
    way = Pass.FORWARD if kind is Pass.FORWARD else Pass.BACKWARD
    step = 1 if way is Pass.FORWARD else -1
    rank = schedule.rank_of(stage)
    comes, goes = (
        0 <= other < schedule.num_stages and schedule.rank_of(other) != rank for other in (stage - step, stage + step)
    )
    return {(way, stage, number)} if comes else set(), {(way, stage + step, number)} if goes else set()
