"""A pipeline as plans see it: its schedule, the blocks of its stages, and simulated steps of one of its ranks.

The schedule and the borders are the engine's own. A rank is simulated alone, so it may also run the list of a shorter
pipeline: it then has fewer micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import shardwell
from shardwell.config import load
from shardwell.errors import ConfigError
from shardwell.memory.machine import SimulatedBlocks, SimulatedMachine
from shardwell.pipeline.operations import Operation
from shardwell.pipeline.schedules import Schedule, make_schedule
from shardwell.pipeline.split import SplitModel
from shardwell.plan.simulation import BlockModel

ONE_F_ONE_B = "1f1b"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def num_stages(config: Any) -> int:
    """Return the pipeline stages that a configuration asks for."""
    block = config.get("pipeline") if isinstance(config, Mapping) else None
    return int(block.get("stages", 1)) if isinstance(block, Mapping) else 1


@dataclass(frozen=True)
class StagePart:
    """A part of what a rank has: some blocks, micro-batches in flight, and micro-batches in a step."""

    blocks: int
    in_flight: int
    micro_batches: int


@dataclass(frozen=True)
class Pipe:
    """A model that is divided into stages, on a machine."""

    model: BlockModel
    config: dict[str, Any]
    machine: SimulatedMachine
    schedule: Schedule  # of a step with all its micro-batches
    borders: tuple[int, ...]  # the first block of each stage, and the number of blocks

    @classmethod
    def of(cls, model: BlockModel, config: dict[str, Any], machine: SimulatedMachine) -> Pipe:
        """Return the pipeline of a configuration."""
        size, stages = machine.ranks.size, num_stages(config)
        if size % stages or not model.hidden:
            raise ConfigError(f"pipeline.stages: {size} ranks and this model cannot be divided into {stages} stages")
        loaded = load(config, world_size=size)
        block, number = loaded.pipeline, loaded.gradient_accumulation_steps
        assert number is not None
        schedule = make_schedule(block.schedule, stages, number, block.chunks)
        borders = shardwell.pipeline.split(model.build(model.layers)).borders(stages * block.chunks, block.partition)
        return cls(model, config, machine, schedule, tuple(borders))

    @property
    def num_ranks(self) -> int:
        """The ranks along the pipeline."""
        return self.schedule.num_ranks

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of a step."""
        return self.schedule.num_micro_batches

    @cached_property
    def hidden(self) -> Tensor:
        """What a stage sends to the next one for a micro-batch."""
        enabled = (kind for key, kind in _DTYPES.items() if (self.config.get(key) or {}).get("enabled"))
        return torch.empty(
            *self.model.inputs[0].shape, self.model.hidden, dtype=next(enabled, torch.float32), device="meta"
        )

    def num_blocks(self, stage: int) -> int:
        """Return the blocks of a stage."""
        return self.borders[stage + 1] - self.borders[stage]

    def global_rank(self, rank: int) -> int:
        """Return the first of the ranks that have the same place along the pipeline, which is the outermost axis."""
        return rank * (self.machine.ranks.size // self.num_ranks)

    def at(self, rank: int) -> SimulatedMachine:
        """Return the machine as a rank of the pipeline sees it."""
        return replace(self.machine, ranks=replace(self.machine.ranks, rank=self.global_rank(rank)))

    def whole(self, rank: int, number: int | None = None) -> PipeRun:
        """Return steps of a rank with all its blocks, and with this number of micro-batches."""
        number = self.num_micro_batches if number is None else number
        return PipeRun(
            lambda: shardwell.pipeline.split(self.model.build(self.model.layers)),
            self._settings(number),
            self.at(rank),
            self._steps(None, number),
        )

    def few(self, rank: int, part: StagePart) -> PipeRun:
        """Return steps of a rank that has one stage, with some of its blocks; each other stage has one block.

        It runs the list of the first rank of a pipeline of `part.in_flight` ranks.
        """
        here = self.num_blocks(rank)
        machine = replace(self.at(rank), blocks=SimulatedBlocks(part.blocks, here) if part.blocks < here else None)
        depth = self.num_ranks - 1 + part.blocks

        def build() -> SplitModel:
            model = self.model.build(depth)
            names = [place.name for place in shardwell.pipeline.split(model).layers.places]
            borders = [*range(1, rank + 1), *range(rank + part.blocks, depth)]
            return shardwell.pipeline.split(model, at=[names[border] for border in borders])

        name = self.schedule.name
        short = make_schedule(name, part.in_flight, part.micro_batches).ranks[0]
        own = tuple(Operation(rank, kind, number) for _, kind, number in short)
        lists = tuple(own if place == rank else () for place in range(self.num_ranks))
        schedule = Schedule(name, self.num_ranks, part.micro_batches, lists)
        steps = self._steps(schedule, part.micro_batches)
        return PipeRun(build, self._settings(part.micro_batches), machine, steps)

    def _settings(self, number: int) -> dict[str, Any]:
        kept = {key: value for key, value in self.config.items() if key != "train_batch_size"}
        return {**kept, "gradient_accumulation_steps": number}

    def _steps(self, schedule: Schedule | None, number: int) -> Callable[[Any], None]:
        hidden = self.hidden  # not made inside, where it would count as a tensor of the step

        def trains(engine: Any) -> None:
            engine.expect_hidden(hidden)
            if schedule is not None:
                engine.use_schedule(schedule)
            engine.train_batch(iter([self.model.inputs[0]] * number))

        return trains


@dataclass(frozen=True)
class PipeRun:
    """The input of a simulation of a rank of a pipeline: a model, a configuration, a machine and a whole step."""

    build: Callable[[], SplitModel]
    config: dict[str, Any]
    machine: SimulatedMachine
    trains: Callable[[Any], None]
