"""Stages that differ: one has frozen parameters only, or several runs of blocks between which sequences are whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell.errors import ShardwellError
from tests.support import pipelines
from tests.support.pipelines import Decoder, micro_batches, next_token_loss, pipeline_config, stream
from tests.support.ranks import Ranks

STEPS, LENGTH = 2, 4
TRAINED = {
    "last": ("blocks.2", "blocks.3", "norm", "head"),  # the first stage is frozen
    "first": ("tokens", "places", "blocks.0", "blocks.1"),
    "all": ("",),
}
SPLIT = {
    "autotp_size": 2,
    "plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "sequence_parallel": True,
}
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("last", "1f1b", 3, {}),
    ("first", "zb-h1", 3, {}),
    ("all", "interleaved", 1, {"tensor_parallel": SPLIT}),  # two blocks on each rank, which are not neighbours
    ("all", "1f1b", 3, {"tensor_parallel": SPLIT}),
]


def made(trained: str, num_blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)
    model = Decoder(num_blocks).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(TRAINED[trained]))
    return model


def train_all() -> list[tuple[int, dict[str, Tensor]]]:
    found = []
    for trained, schedule, stage, more in CASES:
        model = shardwell.pipeline.split(made(trained), loss_fn=next_token_loss)
        engine: Any = shardwell.initialize(model=model, config=pipeline_config(stage, schedule, **more)).engine
        batches = ((ids[:, :LENGTH], labels[:, :LENGTH]) for ids, labels in stream(STEPS, engine.data_rank))
        for _ in range(STEPS):
            engine.train_batch(batches)
        found.append((engine.data_size, engine.state_dict()))
        engine.destroy(whole=False)
    return found


def plainly(trained: str, data_size: int) -> dict[str, Tensor]:
    model = made(trained)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        batches = [batch for rank in range(data_size) for batch in micro_batches(step, rank)]
        for ids, labels in batches:
            (next_token_loss(model(ids[:, :LENGTH]), labels[:, :LENGTH]) / len(batches)).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.slow
def test_stages_that_differ_follow_plain_pytorch(ranks: Ranks) -> None:
    answers = ranks.run(4, train_all)
    for number, (trained, *_) in enumerate(CASES):
        expected = plainly(trained, answers[0][number][0])
        held = {name: torch.as_tensor(value) for one in answers for name, value in one[number][1].items()}
        assert held.keys() >= expected.keys()
        for name, value in expected.items():
            assert (held[name] - value).abs().max() < 1e-10, f"{CASES[number]}: {name}"


def a_block_each() -> float:
    """Two stages with one block each, between which sequences are whole."""
    model = shardwell.pipeline.split(made("all", 2), loss_fn=next_token_loss)
    config = pipeline_config(1, "1f1b", tensor_parallel=SPLIT)
    engine: Any = shardwell.initialize(model=model, config=config).engine
    batches = ((ids[:, :LENGTH], labels[:, :LENGTH]) for ids, labels in stream(1, engine.data_rank))
    return float(engine.eval_batch(batches))


def test_a_stage_may_have_one_block_with_split_sequences(ranks: Ranks) -> None:
    model, number = made("all", 2), pipelines.NUM_MICRO_BATCHES
    expected = sum(
        float(next_token_loss(model(ids[:, :LENGTH]), labels[:, :LENGTH]).detach())
        for ids, labels in micro_batches(0, 0)
    )
    for found in ranks.run(4, a_block_each):
        assert abs(found - expected / number) < 1e-10


def thawed() -> tuple[str, dict[str, Tensor]]:
    """Unfreeze the first stage after a step: without a word to the next stage, and with `refit`."""
    found: dict[str, Tensor] = {}
    words = ""
    for refits in (False, True):
        model = made("last")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = {key: value for key, value in pipeline_config(2, "1f1b").items() if key != "optimizer"}
        split = shardwell.pipeline.split(model, loss_fn=next_token_loss)
        engine: Any = shardwell.initialize(model=split, optimizer=optimizer, config=config).engine
        batches = stream(STEPS, engine.data_rank)
        engine.train_batch(batches)
        engine.module.requires_grad_(True)
        try:
            if refits:
                engine.refit()
            engine.train_batch(batches)
            found = engine.state_dict()
        except ShardwellError as error:
            words = str(error)
        engine.destroy(whole=False)
    return words, found


def test_a_frozen_stage_is_trained_after_a_refit(ranks: Ranks) -> None:
    model = made("last")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for ids, labels in micro_batches(step, 0):
            (next_token_loss(model(ids), labels) / pipelines.NUM_MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(True)
    answers = ranks.run(2, thawed)
    held = {name: torch.as_tensor(value) for _, values in answers for name, value in values.items()}
    assert held.keys() >= {name for name, _ in model.named_parameters()}
    for name, value in model.named_parameters():
        assert (held[name] - value).abs().max() < 1e-10, name
    assert all("trains now, and the next stage does not know: call engine.refit()" in words for words, _ in answers)
