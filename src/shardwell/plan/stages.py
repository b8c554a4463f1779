"""Plans of pipelines: memory and traffic of the stage whose device has the highest peak.

A rank of a 1f1b schedule is simulated with few blocks and few micro-batches in flight. Its bytes at rest are a constant
and an amount for each block, peaks have another amount for each block and micro-batch in flight, and what it moves one
for each block and micro-batch. A larger simulation must agree, but for the allocator's rounding; otherwise, for other
schedules, and where several blocks are one unit, the first, second and last stage are simulated whole. Where shards are
so small that the optimizer steps several blocks at a time, the peak of the step is that of a simulation of all blocks
of a stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from shardwell.memory import Tier
from shardwell.pipeline.simulation import most_in_flight
from shardwell.plan.depths import TwoDepths
from shardwell.plan.pipes import ONE_F_ONE_B, Pipe, PipeRun, StagePart
from shardwell.plan.simulation import (
    FEWEST_STEPS,
    LAST_BACKWARD,
    MOMENTS,
    STEPS,
    StepCosts,
    along,
    are_alike,
    highest_moment,
    simulate,
)
from shardwell.plan.update_chunks import UpdateChunks, with_estimated_step, with_step_of, without_step

_FEWEST, _FEWEST_AT_3 = 2, 4  # blocks of a stage: at stage 3 two of them are all-gathered ahead of one that computes
_IN_FLIGHT = 2  # micro-batches, from which on each more adds the same
_FILLED = 2  # micro-batches beyond those in flight: one is received ahead while another one computes


def of_stages(pipe: Pipe, *, is_below: bool, verified: bool) -> tuple[StepCosts, list[str]]:
    """Return what a rank of the stage takes whose device has the highest peak.

    `is_below`: states may be stored below the device, where buffers depend on the number of blocks.
    """
    found = None
    if pipe.schedule.name == ONE_F_ONE_B and pipe.num_micro_batches > pipe.num_ranks and not is_below:
        found = _of_few(pipe, verified)
        words = f"all {pipe.num_ranks} stages follow from few blocks and micro-batches of the first, second and last"
    if found is None:
        ends = sorted({0, min(1, pipe.num_ranks - 1), pipe.num_ranks - 1})
        found = {rank: _of_whole(pipe, rank) for rank in ends}
        words = f"stages {', '.join(map(str, found))} of {pipe.num_ranks} were simulated"
    costs = found
    worst = max(costs, key=lambda rank: max(size for key, size in costs[rank].peaks.items() if "device" in key))
    return replace(_folded(costs[worst]), instants={}), [
        f"{words}; the figures are of a rank of stage {worst}, whose peak is highest",
        "forwards of a pipeline are between its backwards: their peaks are those while a pass of their kind runs",
    ]


def _folded(costs: StepCosts) -> StepCosts:
    """Return costs whose last backward, which is a moment of its own, is one of the backwards."""
    peaks = {key: size for key, size in costs.peaks.items() if not key.startswith(LAST_BACKWARD)}
    moments = {name: states for name, states in costs.at_moments.items() if name != LAST_BACKWARD}
    for key, size in costs.peaks.items():
        if key.startswith(LAST_BACKWARD):
            same = key.replace(LAST_BACKWARD, MOMENTS[1])
            if key.endswith(f" {Tier.DEVICE.value}") and size > peaks.get(same, -1):
                moments[MOMENTS[1]] = costs.at_moments[LAST_BACKWARD]
            peaks[same] = max(peaks.get(same, 0), size)
    return replace(costs, peaks=peaks, at_moments=moments, at_peak=moments[highest_moment(peaks)])


def like(pipe: Pipe, rank: int) -> int:
    """Return the rank that is simulated for one: stages in the middle have blocks alone."""
    return rank if rank in (0, pipe.num_ranks - 1) else 1


def _ran(run: PipeRun, steps: int = STEPS) -> StepCosts:
    def forward(engine: object) -> None:
        raise AssertionError("a stage of a pipeline runs whole steps")

    return simulate(run.build(), run.config, run.machine, forward, trains=run.trains, steps=steps)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- all blocks


def _of_whole(pipe: Pipe, rank: int) -> StepCosts:
    """Simulate a stage; with more micro-batches than fill the pipeline, each further one adds the same bytes moved."""
    asked, few = pipe.num_micro_batches, (pipe.num_ranks + 1, pipe.num_ranks + 2)
    if asked <= few[1] or pipe.schedule.num_chunks > 1:
        return _ran(pipe.whole(rank))
    one, other = (_ran(pipe.whole(rank, number)) for number in few)
    return along(one, other, lambda first, second: first + (second - first) * (asked - few[0]))


# ---------------------------------------------------------------------------------------------------------- few blocks


def fewest_blocks(pipe: Pipe) -> int:
    """Return the blocks of a stage from which on each more adds the same."""
    return _FEWEST_AT_3 if pipe.config.get("zero_optimization", {}).get("stage") == 3 else _FEWEST


def _of_few(pipe: Pipe, verified: bool) -> dict[int, StepCosts] | None:
    """Return what the ranks take, by rank; None if a larger simulation does not agree.

    If it need not be `verified`, blocks and micro-batches are taken to add to all stages what they add to the first,
    though stages between have more messages.
    """
    found: dict[int, StepCosts] = {}
    first = _Lines.of(pipe, 0)
    if any(one.bundle > 1 for pair in first.costs for one in pair):
        return None
    lines: dict[int, _Lines | _Shifted] = {}
    exact: dict[tuple[int, int], StepCosts] = {}  # by the rank that is simulated and its blocks
    for rank in range(pipe.num_ranks):
        one = like(pipe, rank)
        if one not in lines:
            made = first if not one else _Lines.of(pipe, one) if verified else _Shifted.of(pipe, one, first)
            lines[one] = made
            if verified and isinstance(made, _Lines) and not made.is_confirmed():
                return None
        target = StagePart(pipe.num_blocks(rank), most_in_flight(pipe.schedule, rank), pipe.num_micro_batches)
        found[rank] = lines[one].at(target)
        if not lines[one].is_plain(target.blocks):
            bound = lines[one].with_estimated_step(found[rank], target.blocks)
            place = one, target.blocks
            if bound is None and place not in exact:
                all_of_them = replace(_smallest(pipe, one), blocks=target.blocks)
                exact[place] = _ran(pipe.few(one, all_of_them), FEWEST_STEPS)
            found[rank] = with_step_of(found[rank], exact[place]) if bound is None else bound
    return found


def _smallest(pipe: Pipe, rank: int) -> StagePart:
    flying = min(_IN_FLIGHT, most_in_flight(pipe.schedule, rank))
    return StagePart(fewest_blocks(pipe), flying, flying + _FILLED)


@dataclass(frozen=True)
class _Shifted:
    """The costs of a rank that differ from those of another one by a constant."""

    other: _Lines
    shift: StepCosts

    @classmethod
    def of(cls, pipe: Pipe, rank: int, other: _Lines) -> _Shifted:
        """Simulate one part of a rank."""
        part = _smallest(pipe, rank)
        own = _ran(pipe.few(rank, part), FEWEST_STEPS)
        return cls(other, along(own, other.at(part), lambda ours, theirs: ours - theirs))

    def is_plain(self, blocks: int) -> bool:
        """Return whether each of so many blocks is updated alone, as those of the other rank are."""
        return self.other.is_plain(blocks)

    def at(self, target: StagePart) -> StepCosts:
        """Return what the rank takes with other numbers."""
        base = self.other.at(target)
        found = along(base, self.shift, lambda first, second: first + second)
        return replace(found, largest_unit=base.largest_unit)

    def with_estimated_step(self, found: StepCosts, blocks: int) -> StepCosts | None:
        """Return costs with a bound of the peak of the step, as of the other rank; None if it may be high."""
        return self.other.with_estimated_step(found, blocks)


@dataclass(frozen=True)
class _Lines:
    """The costs of a rank with one of two numbers of blocks, and one of two numbers of micro-batches."""

    pipe: Pipe
    rank: int
    parts: tuple[StagePart, StagePart]  # the fewest blocks with the fewest micro-batches; more of both
    costs: tuple[tuple[StepCosts, StepCosts], tuple[StepCosts, StepCosts]]  # by blocks, then by micro-batches

    @classmethod
    def of(cls, pipe: Pipe, rank: int) -> _Lines:
        """Simulate the four."""
        small = _smallest(pipe, rank)
        # Of what is in flight more is of use only where the whole schedule has more.
        more = min(small.in_flight + 1, most_in_flight(pipe.schedule, rank))
        large = StagePart(small.blocks + 1, more, small.micro_batches + 1)
        one, other = (
            (
                _ran(pipe.few(rank, replace(small, blocks=number)), FEWEST_STEPS),
                _ran(pipe.few(rank, replace(large, blocks=number)), FEWEST_STEPS),
            )
            for number in (small.blocks, large.blocks)
        )
        return cls(pipe, rank, (small, large), (one, other))

    @cached_property
    def by_block(self) -> tuple[TwoDepths, TwoDepths]:
        """The costs of all numbers of blocks, with the fewer and with the more micro-batches."""
        few, more = self.costs
        return TwoDepths.of(few[0], more[0]), TwoDepths.of(few[1], more[1])

    def at(self, target: StagePart) -> StepCosts:
        """Return what a rank takes with other numbers."""
        small, large = self.parts

        def line(begin: int, end: int, place: int) -> Callable[[int, int], int]:
            return lambda first, second: first + (second - first) * (place - begin) // max(1, end - begin)

        fewer, more = (two.at(target.blocks - small.blocks) for two in self.by_block)
        held = along(fewer, more, line(small.in_flight, large.in_flight, target.in_flight))
        moved = along(fewer, more, line(small.micro_batches, large.micro_batches, target.micro_batches))
        return replace(
            held,
            traffic=moved.traffic,
            calls=moved.calls,
            copies=moved.copies,
            largest_unit=max((one.largest_unit for pair in self.costs for one in pair), key=lambda unit: unit[1]),
        )

    def is_plain(self, blocks: int) -> bool:
        """Return whether each of so many blocks is updated alone, so that the peak of the step is on a line, too."""
        return self._chunks.is_plain(blocks)

    def with_estimated_step(self, found: StepCosts, blocks: int) -> StepCosts | None:
        """Return costs with a bound of the peak of the step, if it has less than half of the highest; else None."""
        return with_estimated_step(found, self.costs[0][0], self._chunks, blocks)

    @property
    def _chunks(self) -> UpdateChunks:
        few, more = (pair[0].updated for pair in self.costs)
        return UpdateChunks(self.parts[0].blocks, few, more)

    def is_confirmed(self) -> bool:
        """Simulate more of both, with a step more; return whether that is what the four predict."""
        large = self.parts[1]
        most = most_in_flight(self.pipe.schedule, self.rank)
        next_one = StagePart(large.blocks + 1, min(most, large.in_flight + 1), large.micro_batches + 1)
        predicted, found = self.at(next_one), _ran(self.pipe.few(self.rank, next_one))
        if not self.is_plain(self.pipe.num_blocks(self.rank)):
            predicted, found = without_step(predicted), without_step(found)
        return are_alike(predicted, found)
