"""Copies and pickles of models of which each rank has a part: refused in words, at every stage, on every axis."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import shardwell
from shardwell.errors import ShardwellError
from tests.support import dtensor_models, expert_models, pipelines, sequence_models, tensor_models
from tests.support.ranks import Ranks

WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "average": AveragedModel,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
}


def tensor_engine(stage: int, kind: str) -> shardwell.Engine:
    case = tensor_models.TensorCase(tensor={"sequence_parallel": kind == "sequence"})
    if kind != "dtensor":
        return tensor_models.started(case, stage)[0]
    model = case.build()
    dtensor_models.parallelized(model, dtensor_models.line_of_ranks(), "plain")
    config = {key: value for key, value in tensor_models.grid_config(case, stage).items() if key != "tensor_parallel"}
    return shardwell.initialize(model=model, optimizer=case.make_optimizer(model), config=config).engine


def refusals(stage: int) -> dict[str, str]:
    """Copy the models of several engines in all ways; return what was said, and what was not refused."""
    engines = {
        "tensor": tensor_engine(stage, "plan"),
        "sequence": tensor_engine(stage, "sequence"),
        "dtensor": tensor_engine(stage, "dtensor"),
        "experts": expert_models.started(expert_models.ExpertCase(), stage),
        "listed experts": expert_models.started(expert_models.ExpertCase(model={"listed": True}), stage),
        "ulysses": sequence_models.started(sequence_models.SequenceCase(), stage),
    }
    found = {}
    for name, engine in engines.items():
        parts = {"model": engine.module, "block": engine.module.blocks[0]}
        for what, part in list(parts.items())[: 1 + (name != "ulysses")]:  # a block is an ordinary module there
            for way, made in WAYS.items():
                with pytest.raises(ShardwellError) as error:
                    made(part)
                found[f"{name} {what} {way}"] = str(error.value)
        engine.destroy()
        assert type(copy.deepcopy(engine.module)) is type(engine.module)
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_in_parts_is_not_copied(ranks: Ranks, stage: int) -> None:
    for found in ranks.run(2, refusals, stage):
        for case, words in found.items():
            assert "cannot be copied or pickled" in words, case
            assert "ExponentialMovingAverage" in words, case


def copied_stage() -> tuple[str, str, bool]:
    model = shardwell.pipeline.split(pipelines.Decoder(), loss_fn=pipelines.next_token_loss)
    engine = shardwell.initialize(model=model, config=pipelines.pipeline_config(1, "1f1b")).engine
    average: Any = AveragedModel(engine.module)
    average.update_parameters(engine.module)
    pairs = zip(average.module.parameters(), engine.module.parameters(), strict=True)
    is_equal = all(torch.equal(one, other) for one, other in pairs)
    with pytest.raises(ShardwellError) as called:
        average(pipelines.micro_batches(0, 0)[0][0])
    with pytest.raises(ShardwellError) as saved:
        torch.save(engine.module, io.BytesIO())
    return str(called.value), str(saved.value), is_equal


def test_a_pipeline_stage_is_copied_for_averages_and_nothing_else(ranks: Ranks) -> None:
    for called, saved, is_equal in ranks.run(2, copied_stage):
        assert "this rank has one stage of it" in called
        assert "this rank has one pipeline stage of it" in saved
        assert is_equal
