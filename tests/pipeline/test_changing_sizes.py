"""Steps of other numbers of micro-batches in the middle of a pipeline's training, by DeepSpeed's setters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwell import pipeline
from shardwell.compat.deepspeed_api.initialization import initialize
from shardwell.errors import ShardwellError
from tests.support.pipelines import (
    ROWS,
    Decoder,
    micro_batches,
    next_token_loss,
    pipeline_config,
    stream,
)
from tests.support.ranks import Ranks

STEPS = [(4, ROWS), (8, ROWS), (1, ROWS), (3, ROWS), (3, 1)]  # micro-batches, and rows of each


def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder().double()


def batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    number, rows = STEPS[step]
    return [(ids[:rows], labels[:rows]) for ids, labels in micro_batches(step, 0, number)]


def plain() -> list[float]:
    trained, losses = model(), []
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, weight_decay=0.01)
    for step, (number, _) in enumerate(STEPS):
        parts = [next_token_loss(trained(ids), labels) / number for ids, labels in batches(step)]
        sum(parts).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(float(part.detach()) for part in parts))
    return losses


def changing(schedule: str) -> tuple[list[float], list[Any], str]:
    engine: Any = initialize(
        model=pipeline.split(model(), loss_fn=next_token_loss), config=pipeline_config(1, schedule)
    )[0]
    losses, sizes = [], []
    for step, (number, rows) in enumerate(STEPS):
        if rows != engine.train_micro_batch_size_per_gpu():
            engine.set_train_micro_batch_size(rows)
        elif number != engine.gradient_accumulation_steps():
            engine.set_train_batch_size(number * rows)
        losses.append(float(engine.train_batch(iter(batches(step)))))
        sizes.append((engine.train_batch_size(), engine.micro_batches))
    engine.use_schedule(engine.schedule)
    engine.set_train_batch_size(8)
    try:
        engine.train_batch(stream(2, 0))
    except ShardwellError as error:
        return losses, sizes, str(error)
    return losses, sizes, ""


def test_steps_of_other_sizes_follow_plain_pytorch(ranks: Ranks) -> None:
    expected = plain()
    for schedule in ("1f1b", "interleaved", "zb-h1"):
        for losses, sizes, refusal in ranks.run(2, changing, schedule):
            assert max(abs(one - other) for one, other in zip(losses, expected, strict=True)) < 1e-10, schedule
            assert sizes == [(number * rows, number) for number, rows in STEPS]
            assert "has 3 micro-batches, and a step has 8" in refusal
