"""The time of a pipeline's step.

Ranks of the first, second and last stage run in virtual time, with few blocks and micro-batches, as if every message
were there already: what each of their operations takes is read off the clock. The engine's own schedule then says when
each operation of each rank begins: when the one before it has ended and what it reads has come. A step ends with the
update, which begins on all ranks once all gradients are there.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from shardwell.errors import ShardwellError
from shardwell.pipeline.operations import Operation, Pass
from shardwell.pipeline.schedules import Schedule
from shardwell.pipeline.simulation import Simulated, own_messages, simulate
from shardwell.plan.pipes import Pipe, PipeRun, StagePart
from shardwell.plan.stages import fewest_blocks, like
from shardwell.plan.step_time import BUBBLE, ResourceTime, StepTime, TimedEngine, extrapolated, read, timed_engine
from shardwell.virtual_time.virtual_clock import COMPUTE, RESOURCES, Task, VirtualClock

_IN_FLIGHT, _MICRO_BATCHES = 2, 3  # the first, one that is like all others, and the last
_NEAR = 0.005  # share of an operation's time by which a third depth may differ from a line


class _Place(enum.Enum):
    """The position of an operation among those of its stage."""

    FIRST = 0  # its forward may wait for what the last step has published
    BETWEEN = 1
    LAST = 2  # after it gradients are reduced


def _place_of(one: Operation, last: Iterable[Operation]) -> _Place:
    if one in last:
        return _Place.LAST
    return _Place.FIRST if one.kind is Pass.FORWARD and not one.micro_batch else _Place.BETWEEN


_Key = tuple[int, Pass, _Place]  # the chunk of the rank, the pass and the place


@dataclass(frozen=True)
class RankTimes:
    """The times that the operations of a rank take, and what is left when they are done."""

    operations: dict[_Key, StepTime]
    drain: StepTime  # until its gradients are reduced
    update: StepTime
    samples: int  # of a micro-batch, of all ranks together

    def of(self, key: _Key) -> StepTime:
        """Return the time of an operation; with few micro-batches, that of the nearest one that was simulated."""
        chunk, kind, place = key
        nearest = sorted(_Place, key=lambda one: abs(one.value - place.value))
        found = (self.operations.get((chunk, kind, one)) for one in nearest)
        return next(one for one in found if one is not None)

    def towards(self, other: RankTimes, blocks: int) -> RankTimes:
        """Return the times with so many blocks more, of which `other` has one."""

        def line(one: StepTime, second: StepTime) -> StepTime:
            return extrapolated(one, second, 1, blocks)

        operations = {key: line(one, other.operations[key]) for key, one in self.operations.items()}
        return replace(
            self, operations=operations, drain=line(self.drain, other.drain), update=line(self.update, other.update)
        )

    def is_near(self, other: RankTimes) -> bool:
        """Return whether operations take as long, but for a small share."""
        pairs = [(one.seconds, other.operations[key].seconds) for key, one in self.operations.items()]
        whole = sum(second for _, second in pairs)
        return all(abs(first - second) <= _NEAR * whole for first, second in pairs)


# ------------------------------------------------------------------------------------------------------- of one rank


def _measured(run: PipeRun, num_ranks: int) -> RankTimes:
    """Run steps of a rank in virtual time; return what the operations of the last one took."""
    with timed_engine(run.build(), run.config, run.machine) as timed:
        clock, engine = timed.clock, timed.engine
        ends = _noting_the_end(timed)
        for _ in range(timed.num_steps):
            timed.trace.operations.clear()
            with timed.kernels:
                run.trains(engine)
        end = clock.now().time
        timed.settle()
        schedule: Schedule = engine.schedule
        controls = [task.begin for task in clock.tasks if task.name == "control" and task.end > ends[-1]]
        if not controls:
            raise ShardwellError("a simulated stage has not exchanged its norm: its time is not known")
        norm = max(controls[0], ends[-1])
        marks = [(Operation.parse(text), begin, flops) for text, begin, flops in timed.trace.operations]
        closing = (marks[-1][0], ends[-1], marks[-1][2])
        found: defaultdict[_Key, list[StepTime]] = defaultdict(list)
        for (one, begin, flops), (_, until, later) in pairwise([*marks, closing]):
            key = one.stage // num_ranks, one.kind, _place_of(one, schedule.last_gradients)
            model_flops = 3 * (later - flops) if one.kind is Pass.FORWARD else 0.0
            found[key].append(replace(read(clock, begin, until), model_flops=model_flops))
        peak = timed.peak_flops
        return RankTimes(
            {key: replace(times[-1], peak_flops=peak) for key, times in found.items()},
            read(clock, ends[-1], norm),
            read(clock, norm, end),
            engine.train_batch_size() // engine.gradient_accumulation_steps(),
        )


def _noting_the_end(timed: TimedEngine) -> list[float]:
    """Return a list that gets the time at which the operations of each step have ended."""
    runner: Any = timed.engine._runner
    run: Callable[..., Any] = runner.run
    ends: list[float] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        found = run(*args, **kwargs)
        ends.append(timed.clock.now().time)
        return found

    runner.run = noted
    return ends


def _of_ranks(pipe: Pipe, verified: bool, has_bundles: bool) -> list[RankTimes]:
    """Return the times of all ranks of a pipeline; of all blocks where several are one unit."""
    known: dict[tuple[int, int], RankTimes] = {}

    def simulated(rank: int, blocks: int) -> RankTimes:
        number = min(_MICRO_BATCHES, pipe.num_micro_batches)
        part = StagePart(blocks, min(_IN_FLIGHT, pipe.num_ranks - rank), number)
        if (rank, blocks) not in known:
            known[rank, blocks] = _measured(pipe.few(rank, part), pipe.num_ranks)
        return known[rank, blocks]

    def times(rank: int) -> RankTimes:
        blocks, fewest = pipe.num_blocks(rank), fewest_blocks(pipe)
        if has_bundles or blocks <= fewest + 2:
            return simulated(like(pipe, rank), blocks)
        one, other = (simulated(like(pipe, rank), number) for number in (fewest, fewest + 1))
        if verified and not one.towards(other, 2).is_near(simulated(like(pipe, rank), fewest + 2)):
            return simulated(like(pipe, rank), blocks)
        return one.towards(other, blocks - fewest)

    if pipe.schedule.num_chunks > 1:
        number = min(pipe.num_ranks, pipe.num_micro_batches)
        ends = sorted({0, min(1, pipe.num_ranks - 1), pipe.num_ranks - 1})
        found = {rank: _measured(pipe.whole(rank, number), pipe.num_ranks) for rank in ends}
        return [found[like(pipe, rank)] for rank in range(pipe.num_ranks)]
    return [times(rank) for rank in range(pipe.num_ranks)]


# ------------------------------------------------------------------------------------------------------ of all ranks


@dataclass
class _PipeTimes:
    """The times of all operations of a schedule."""

    pipe: Pipe
    ranks: list[RankTimes]
    links: dict[tuple[int, int], tuple[str, float]] = field(default_factory=dict)  # of a message, by its two ranks

    def of(self, one: Operation) -> StepTime:
        """Return the time of an operation that begins with the step, or when all of the last step has been there."""
        chunk, kind, place = self._key(one)
        found = self._times(one).of((chunk, kind, place))
        usual = self._times(one).of((chunk, kind, _Place.BETWEEN)) if place is _Place.FIRST else found
        return max(found, usual, key=lambda time: time.seconds)

    def end_of(self, one: Operation, begin: float) -> float:
        """Return when an operation ends that begins at a time.

        What the last step has published comes from the beginning of the step on, whenever the first forward begins.
        """
        chunk, kind, place = self._key(one)
        seconds = self.of(one).seconds
        if place is not _Place.FIRST or chunk:
            return begin + seconds
        return max(begin + self._times(one).of((chunk, kind, _Place.BETWEEN)).seconds, seconds)

    def message_to(self, one: Operation) -> float:
        """Return the seconds that a message to an operation takes."""
        return self.link_to(one)[1]

    def link_to(self, one: Operation) -> tuple[str, float]:
        """Return the link of a message to an operation, and its seconds."""
        schedule, machine = self.pipe.schedule, self.pipe.machine
        source = one.stage - 1 if one.kind is Pass.FORWARD else one.stage + 1
        pair = schedule.rank_of(source), schedule.rank_of(one.stage)
        if pair not in self.links:
            per_node = machine.local_world_size(machine.ranks.size)
            nodes = {self.pipe.global_rank(rank) // per_node for rank in pair}
            size = self.pipe.hidden.nbytes
            assert machine.speeds is not None
            inside, between = (size, 0) if len(nodes) == 1 else (0, size)
            self.links[pair] = VirtualClock(machine.speeds).link_seconds(inside, between, len(nodes))
        return self.links[pair]

    def _times(self, one: Operation) -> RankTimes:
        return self.ranks[self.pipe.schedule.rank_of(one.stage)]

    def _key(self, one: Operation) -> _Key:
        schedule = self.pipe.schedule
        return one.stage // schedule.num_ranks, one.kind, _place_of(one, schedule.last_gradients)


def time_of_pipe(pipe: Pipe, *, verified: bool = True, has_bundles: bool = False) -> tuple[StepTime, list[str]]:
    """Return the time of a step, as the rank sees it that works longest, and which rank that is.

    Where several blocks are one unit, stages are simulated with all of them.
    """
    times = _PipeTimes(pipe, _of_ranks(pipe, verified, has_bundles))
    found, lists = simulate(pipe.schedule, times), pipe.schedule.ranks
    ends = [found.spans[ones[-1]][1] for ones in lists]
    updated = max(end + one.drain.seconds for end, one in zip(ends, times.ranks, strict=True))
    seconds = updated + max(one.update.seconds for one in times.ranks)
    longest = max(range(pipe.num_ranks), key=found.busy)
    flops = sum(times.of(one).model_flops for ones in lists for one in ones) / pipe.num_ranks
    whole = replace(
        _of_rank(times, found, longest, updated, seconds),
        model_flops=flops,
        samples=times.ranks[0].samples * pipe.num_micro_batches,
    )
    return whole, [
        f"a step has {pipe.num_micro_batches} micro-batches in the order of the schedule '{pipe.schedule.name}'; its "
        f"time is shown as a rank of stage {longest} sees it, which computes longest, with messages of "
        f"{pipe.hidden.nbytes:,} bytes between stages"
    ]


def _of_rank(times: _PipeTimes, found: Simulated, rank: int, updated: float, seconds: float) -> StepTime:
    """Return a step as one rank sees it: its operations, its update, and the bubble."""
    pipe, own = times.pipe, times.ranks[rank]
    busy, exposed, sizes = defaultdict[str, float](float), defaultdict[str, float](float), Counter[str]()
    events: list[Task] = []
    waits: list[Task] = []
    at = 0.0

    def add(name: str, time: StepTime, begin: float, end: float) -> None:
        nonlocal at
        share = min(1.0, (end - begin) / time.seconds) if time.seconds else 0.0
        for resource, one in time.by_resource.items():
            busy[resource] += share * one.busy
            exposed[resource] += share * one.exposed
        for task in time.events:
            sizes[task.resource] += task.num_bytes
        if begin > at:
            waits.append(Task(BUBBLE, BUBBLE, at, begin))
        events.append(Task(name, COMPUTE, begin, end))
        at = end

    for one in pipe.schedule.ranks[rank]:
        add(_words(one, pipe.schedule), times.of(one), *found.spans[one])
        if own_messages(pipe.schedule, one)[0]:
            link, took = times.link_to(one)
            busy[link] += took
            sizes[link] += pipe.hidden.nbytes
    add("reduce", own.drain, at, at + own.drain.seconds)
    add("update", own.update, updated, updated + own.update.seconds)
    if seconds > at:
        waits.append(Task(BUBBLE, BUBBLE, at, seconds))
    exposed[BUBBLE] = max(0.0, seconds - sum(exposed.values()))
    names = [name for name in (*RESOURCES, BUBBLE) if busy[name] or exposed[name]]
    by_resource = {name: ResourceTime(busy[name], exposed[name]) for name in names}
    peak = next(iter(own.operations.values())).peak_flops
    return StepTime(seconds, by_resource, tuple(events), tuple(waits), dict(sizes), peak_flops=peak)


def _words(one: Operation, schedule: Schedule) -> str:
    word = {Pass.FORWARD: "forward", Pass.BACKWARD_WEIGHT: "weights"}.get(one.kind, "backward")
    stage = f" of stage {one.stage}" if schedule.num_chunks > 1 else ""
    return f"{word} {one.micro_batch}{stage}"
