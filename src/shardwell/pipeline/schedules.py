"""The schedules of a pipeline: for each rank, the list of its operations. They are data; `runner.py` executes them.

Stage `s` of a pipeline is on rank `s % ranks`: with several chunks, each rank has several stages.

    gpipe        all forwards, then all backwards
    1f1b         forwards until the first backward can run, then one forward, one backward
    interleaved  1f1b over several chunks per rank (Megatron's)
    zb-h1        1f1b whose weight gradients fill the bubble at the end (zero bubble, handcrafted schedule 1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwell.errors import ConfigError, ShardwellError
from shardwell.pipeline.operations import Operation, Pass, parse_operations

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")


@dataclass(frozen=True)
class Schedule:
    """The operations of every rank of a pipeline."""

    name: str
    num_stages: int
    num_micro_batches: int
    ranks: tuple[tuple[Operation, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_chunks(self) -> int:
        """The number of stages that each rank has."""
        return self.num_stages // self.num_ranks

    @cached_property
    def operations(self) -> frozenset[Operation]:
        """The operations of all ranks."""
        return frozenset(one for rank in self.ranks for one in rank)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed later than the gradients of inputs."""
        return any(one.kind is Pass.BACKWARD_WEIGHT for one in self.operations)

    @cached_property
    def last_gradients(self) -> frozenset[Operation]:
        """The operations after which a stage gets no more gradients: the boundary of that stage."""
        last: dict[int, Operation] = {}
        for rank in self.ranks:
            for one in rank:
                if one.kind is not Pass.FORWARD:
                    last[one.stage] = one
        return frozenset(last.values())

    def rank_of(self, stage: int) -> int:
        """Return the rank, along the pipeline, that has a stage."""
        return stage % self.num_ranks

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, rank)) for rank in self.ranks)


def make_schedule(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """Return the schedule of this name for a pipeline over `num_ranks` ranks."""
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline.schedule: expected one of {', '.join(SCHEDULES)}, found '{name}'")
    if num_chunks > 1 and name != "interleaved":
        raise ConfigError(
            f"pipeline.chunks: {num_chunks} chunks per rank need the schedule 'interleaved'; '{name}' has one. Set "
            '"schedule": "interleaved", or "chunks": 1.'
        )
    make: Callable[[int], list[Operation]]
    if name == "gpipe":
        make = _gpipe(num_micro_batches)
    elif name == "interleaved":
        make = _interleaved(num_ranks, num_micro_batches, num_chunks)
    else:
        make = _one_stage_each(num_ranks, num_micro_batches, splits=name == "zb-h1")
    ranks = tuple(tuple(make(rank)) for rank in range(num_ranks))
    return Schedule(name, num_ranks * num_chunks, num_micro_batches, ranks)


def read_schedule(lists: Mapping[int, Iterable[object]] | Sequence[Iterable[object]], name: str = "custom") -> Schedule:
    """Return the schedule that lists of operations describe, one list per rank, after a check that it can run.

    An entry is an operation, its text (`2F0`), or an action of one of torch's schedules (its `pipeline_order`).
    """
    rows = [lists[rank] for rank in sorted(lists)] if isinstance(lists, Mapping) else list(lists)
    ranks = tuple(tuple(parse_operations(row)) for row in rows)
    every = [one for rank in ranks for one in rank]
    if not every:
        raise ShardwellError("a schedule needs at least one operation")
    stages, micro_batches = 1 + max(one.stage for one in every), 1 + max(one.micro_batch for one in every)
    schedule = Schedule(name, stages, micro_batches, ranks)
    check_schedule(schedule)
    return schedule


def check_schedule(schedule: Schedule) -> None:
    """Raise an error unless every stage does every micro-batch once, on its own rank and in an order that can run."""
    if schedule.num_stages % schedule.num_ranks:
        raise ShardwellError(
            f"schedule '{schedule.name}': {schedule.num_stages} stages on {schedule.num_ranks} ranks; each rank must "
            "have the same number of them"
        )
    counts: dict[Operation, int] = {}
    for number, rank in enumerate(schedule.ranks):
        for one in rank:
            counts[one] = counts.get(one, 0) + 1
            if schedule.rank_of(one.stage) != number:
                raise ShardwellError(
                    f"schedule '{schedule.name}': {one} is in the list of rank {number}, and stage {one.stage} is on "
                    f"rank {schedule.rank_of(one.stage)} (stage s is on rank s % {schedule.num_ranks})"
                )
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.num_micro_batches):
            forward, whole, of_input, of_weight = (
                counts.get(Operation(stage, kind, micro_batch), 0)
                for kind in (Pass.FORWARD, Pass.BACKWARD, Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT)
            )
            if forward != 1 or (whole, of_input, of_weight) not in ((1, 0, 0), (0, 1, 1)):
                raise ShardwellError(
                    f"schedule '{schedule.name}': stage {stage} has {forward} forwards and {whole} + {of_input} + "
                    f"{of_weight} backwards (B, I, W) of micro-batch {micro_batch}; expected one F, and one B or one I "
                    "and one W"
                )
    _check_order(schedule)


def _check_order(schedule: Schedule) -> None:
    """Raise an error if ranks would wait for each other."""
    done: set[Operation] = set()
    next_of = [0] * schedule.num_ranks
    progressed = True
    while progressed:
        progressed = False
        for number, rank in enumerate(schedule.ranks):
            while next_of[number] < len(rank) and done.issuperset(needs(schedule, rank[next_of[number]])):
                done.add(rank[next_of[number]])
                next_of[number] += 1
                progressed = True
    stuck = [rank[at] for rank, at in zip(schedule.ranks, next_of, strict=True) if at < len(rank)]
    if stuck:
        raise ShardwellError(
            f"schedule '{schedule.name}' cannot run: {', '.join(map(str, stuck))} wait for operations that come later"
        )


def needs(schedule: Schedule, one: Operation) -> list[Operation]:
    """Return the operations whose results an operation reads."""
    stage, kind, micro_batch = one
    if kind is Pass.FORWARD:
        return [Operation(stage - 1, kind, micro_batch)] if stage else []
    if kind is Pass.BACKWARD_WEIGHT:
        return [Operation(stage, Pass.BACKWARD_INPUT, micro_batch)]
    own = Operation(stage, Pass.FORWARD, micro_batch)
    if stage == schedule.num_stages - 1:
        return [own]
    # The stage behind may split its backward, or not.
    behind = Pass.BACKWARD_INPUT if schedule.splits_backward else Pass.BACKWARD
    if schedule.splits_backward and Operation(stage + 1, behind, micro_batch) not in schedule.operations:
        behind = Pass.BACKWARD
    return [own, Operation(stage + 1, behind, micro_batch)]


# ----------------------------------------------------------------------------------------------------- generators


def _gpipe(num_micro_batches: int) -> Callable[[int], list[Operation]]:
    def make(rank: int) -> list[Operation]:
        numbers = range(num_micro_batches)
        return [Operation(rank, kind, number) for kind in (Pass.FORWARD, Pass.BACKWARD) for number in numbers]

    return make


def _one_stage_each(num_ranks: int, num_micro_batches: int, *, splits: bool) -> Callable[[int], list[Operation]]:
    def make(rank: int) -> list[Operation]:
        places = [(rank, number) for number in range(num_micro_batches)]
        warm_up = min(num_ranks - 1 - rank, num_micro_batches)
        # A later rank ends earlier, by one backward of inputs per rank: so many weight gradients fill its end.
        return _alternate(places, places, warm_up, delay=rank if splits else None)

    return make


def _interleaved(num_ranks: int, num_micro_batches: int, num_chunks: int) -> Callable[[int], list[Operation]]:
    rounds = max(1, num_micro_batches // num_ranks)
    if num_micro_batches % rounds:
        raise ConfigError(
            f"pipeline.schedule: 'interleaved' takes micro-batches in rounds of {num_ranks} or a few more, all of the "
            f"same size, and {num_micro_batches} micro-batches (gradient_accumulation_steps) are not {rounds} equal "
            f"rounds. Use a multiple of {num_ranks}."
        )
    per_round = num_micro_batches // rounds

    def make(rank: int) -> list[Operation]:
        def places(chunks: Sequence[int]) -> list[tuple[int, int]]:
            return [
                (chunk * num_ranks + rank, start + number)
                for start in range(0, num_micro_batches, per_round)
                for chunk in chunks
                for number in range(per_round)
            ]

        order = range(num_chunks)
        warm_up = (num_chunks - 1) * per_round + 2 * (num_ranks - 1 - rank)
        return _alternate(places(order), places(order[::-1]), min(warm_up, num_chunks * num_micro_batches))

    return make


def _alternate(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], warm_up: int, delay: int | None = None
) -> list[Operation]:
    """Return `warm_up` forwards, then one forward and one backward in turns, then the remaining backwards.

    With a delay, backwards are split, and each weight gradient comes `delay` backwards later than its input gradient.
    """
    kind = Pass.BACKWARD if delay is None else Pass.BACKWARD_INPUT
    operations = [Operation(stage, Pass.FORWARD, number) for stage, number in forwards[:warm_up]]
    for index, (stage, number) in enumerate(backwards):
        if warm_up + index < len(forwards):
            ahead, its_number = forwards[warm_up + index]
            operations.append(Operation(ahead, Pass.FORWARD, its_number))
        operations.append(Operation(stage, kind, number))
        if delay is not None and index >= delay:
            operations.append(Operation(backwards[index - delay][0], Pass.BACKWARD_WEIGHT, backwards[index - delay][1]))
    if delay is not None:
        rest = backwards[max(len(backwards) - delay, 0) :]
        operations += [Operation(stage, Pass.BACKWARD_WEIGHT, number) for stage, number in rest]
    return operations
