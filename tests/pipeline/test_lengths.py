"""Micro-batches of different lengths: replicas of a pipeline may have their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell.errors import ShardwellError
from tests.support.pipelines import Decoder, micro_batches, next_token_loss, pipeline_config
from tests.support.ranks import Ranks

STEPS = 3
CASES = [(1, "1f1b"), (3, "zb-h1"), (2, "interleaved")]


def made() -> nn.Module:
    torch.manual_seed(0)
    return Decoder().double()


def of_lengths(step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches whose lengths differ between steps, replicas, and among each other."""
    found = []
    for number, (ids, labels) in enumerate(micro_batches(step, rank)):
        length = 2 + (step + rank + number) % 3
        found.append((ids[:, :length], labels[:, :length]))
    return found


def trained() -> list[dict[str, Tensor]]:
    found = []
    for stage, schedule in CASES:
        model = shardwell.pipeline.split(made(), loss_fn=next_token_loss)
        engine: Any = shardwell.initialize(model=model, config=pipeline_config(stage, schedule)).engine
        for step in range(STEPS):
            engine.eval_batch(iter(of_lengths(step + 10, engine.data_rank)))
            engine.train_batch(iter(of_lengths(step, engine.data_rank)))
        found.append(engine.state_dict())
        engine.destroy(whole=False)
    return found


@pytest.mark.slow
def test_replicas_of_a_pipeline_have_micro_batches_of_their_own_lengths(ranks: Ranks) -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        batches = [batch for rank in range(2) for batch in of_lengths(step, rank)]
        for ids, labels in batches:
            (next_token_loss(model(ids), labels) / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(model.named_parameters())
    answers = ranks.run(4, trained)
    for number, case in enumerate(CASES):
        held = {name: torch.as_tensor(value) for one in answers for name, value in one[number].items()}
        for name, value in expected.items():
            assert (held[name] - value).abs().max() < 1e-10, f"{case}: {name}"


def given_a_list() -> str:
    model = shardwell.pipeline.split(made(), loss_fn=next_token_loss)
    engine: Any = shardwell.initialize(model=model, config=pipeline_config(1, "1f1b")).engine
    try:
        engine.train_batch(of_lengths(0, 0))
    except ShardwellError as error:
        return str(error)
    return ""


def test_micro_batches_that_are_no_iterator_are_refused(ranks: Ranks) -> None:
    assert all("and got a list: make one by iter(...)" in one for one in ranks.run(2, given_a_list))
