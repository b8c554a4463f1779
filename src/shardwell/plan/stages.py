"""Plans of pipelines: the stages whose ranks can need most, and micro-batches beyond those that fill the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

import shardwell
from shardwell.engine import Engine
from shardwell.errors import ConfigError
from shardwell.memory.machine import SimulatedMachine
from shardwell.plan.simulation import BlockModel, StepCosts, along, simulate


def num_stages(config: Any) -> int:
    """Return the pipeline stages that a configuration asks for."""
    block = config.get("pipeline") if isinstance(config, Mapping) else None
    return int(block.get("stages", 1)) if isinstance(block, Mapping) else 1


def of_stages(
    model: BlockModel, config: dict[str, Any], machine: SimulatedMachine, stages: int
) -> tuple[StepCosts, list[str]]:
    """Return what a rank of the stage takes whose device has the highest peak, of the first, second and last one.

    The stages between hold fewer micro-batches than the second, and blocks alone.
    """
    size = machine.ranks.size
    if size % stages or not model.hidden:
        raise ConfigError(f"pipeline.stages: {size} ranks and this model cannot be divided into {stages} stages")
    found = {}
    for stage in sorted({0, min(1, stages - 1), stages - 1}):
        at = replace(machine, ranks=replace(machine.ranks, rank=stage * (size // stages)))
        found[stage] = _of_stage(model, config, at, stages)
    worst = max(found, key=lambda stage: max(size for key, size in found[stage].peaks.items() if "device" in key))
    words = ", ".join(str(stage) for stage in found)
    return found[worst], [
        f"stages {words} of {stages} were simulated; the figures are of a rank of stage {worst}, whose peak is highest",
        "forwards of a pipeline are between its backwards: its peaks are of whole steps",
    ]


def _of_stage(model: BlockModel, config: dict[str, Any], machine: SimulatedMachine, stages: int) -> StepCosts:
    """Simulate a stage; with more micro-batches than fill the pipeline, each further one adds the same bytes moved."""
    asked = int(config.get("gradient_accumulation_steps", 1))
    few = (stages + 1, stages + 2)
    if asked <= few[1]:
        return _run(model, config, machine, asked)
    one, other = (_run(model, config, machine, number) for number in few)
    return along(one, other, lambda first, second: first + (second - first) * (asked - few[0]))


def _run(model: BlockModel, config: dict[str, Any], machine: SimulatedMachine, number: int) -> StepCosts:
    settings = {key: value for key, value in config.items() if key != "train_batch_size"}
    settings["gradient_accumulation_steps"] = number
    batch = model.inputs[0]
    dtype = next((kind for key, kind in _DTYPES.items() if (config.get(key) or {}).get("enabled")), torch.float32)
    hidden = torch.empty(*batch.shape, model.hidden, dtype=dtype, device="meta")

    def trains(engine: Any) -> None:
        engine.expect_hidden(hidden)
        engine.train_batch(iter([batch] * number))

    def forward(engine: Engine) -> Any:
        raise AssertionError("a stage of a pipeline runs whole steps")

    split: Any = shardwell.pipeline.split(model.build(model.layers))
    return simulate(split, settings, machine, forward, trains=trains)


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
