"""A tied embedding whose output layer is cut over a tensor axis, on the first and the last stage of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwell
from shardwell.errors import ShardwellError
from shardwell.sharding.tensor_part import part_of
from tests.support.pipelines import Decoder, next_token_loss, pipeline_config, plain, stream
from tests.support.ranks import Ranks

STEPS = 3
BLOCKS = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
HEAD, WORDS = {"head": "colwise_gather_output"}, {"tokens": "embedding_rowwise"}
CASES = [(1, "1f1b", HEAD), (3, "zb-h1", HEAD), (2, "interleaved", {**HEAD, **WORDS})]


def made() -> torch.nn.Module:
    torch.manual_seed(0)
    return Decoder(tied=True).double()


def started(stage: int, schedule: str, ends: dict[str, str]) -> Any:
    tensor = {"autotp_size": 2, "plan": {**BLOCKS, **ends}}
    model = shardwell.pipeline.split(made(), loss_fn=next_token_loss)
    return shardwell.initialize(model=model, config=pipeline_config(stage, schedule, tensor_parallel=tensor)).engine


def trained() -> list[Any]:
    found: list[Any] = []
    for case in CASES:
        engine = started(*case)
        batches = stream(STEPS, engine.data_rank)
        for _ in range(STEPS):
            engine.train_batch(batches)
        parts = [name for name, parameter in engine.module.named_parameters() if part_of(parameter) is not None]
        found.append((parts, engine.state_dict()))
        engine.destroy(whole=False)
    try:
        started(1, "1f1b", WORDS)
    except ShardwellError as error:
        found.append(str(error))
    return found


@pytest.mark.slow
def test_the_copies_of_a_tied_weight_are_cut_alike(ranks: Ranks) -> None:
    expected = plain(made(), STEPS, data_size=1)["parameters"]
    answers = ranks.run(4, trained)
    for *found, words in answers:
        assert "'head' shares its weight with a layer that is cut" in words
        for case, (parts, values) in zip(CASES, found, strict=True):
            assert "tokens.weight" in parts  # the first name of the weight, on both stages
            for name, value in values.items():
                want = expected.get(name, expected["tokens.weight"])
                assert (torch.as_tensor(value) - want).abs().max() < 1e-10, f"{case}: {name}"


def with_shared_block() -> torch.nn.Module:
    torch.manual_seed(0)
    model = Decoder().double()
    model.blocks[2] = model.blocks[0]  # on the other stage
    return model


def trained_with_shared_block() -> dict[str, Any]:
    model = shardwell.pipeline.split(with_shared_block(), loss_fn=next_token_loss)
    tensor = {"autotp_size": 2, "plan": BLOCKS}
    engine: Any = shardwell.initialize(model=model, config=pipeline_config(1, "1f1b", tensor_parallel=tensor)).engine
    batches = stream(STEPS, engine.data_rank)
    for _ in range(STEPS):
        engine.train_batch(batches)
    found: dict[str, Any] = engine.state_dict()
    engine.destroy(whole=False)
    return found


def test_a_block_that_two_stages_share_is_cut_on_both(ranks: Ranks) -> None:
    expected = plain(with_shared_block(), STEPS, data_size=1)["parameters"]
    answers = ranks.run(4, trained_with_shared_block)
    assert {name for values in answers for name in values} >= set(expected)
    for values in answers:
        for name in expected.keys() & values.keys():
            assert (torch.as_tensor(values[name]) - expected[name]).abs().max() < 1e-10, name
