"""Checkpoints carry the position in the data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import shardwell
from shardwell.errors import CheckpointError
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks

SAMPLES = 40


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(index)]) for index in range(SAMPLES))


def engine_for(data: Any, size: int) -> shardwell.Engine:
    config = zero(3, train_micro_batch_size_per_gpu=size, shardwell={"shard_at_world_one": True})
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config, training_data=data).engine


def trained(root: str, size: int, num_steps: int, asynchronous: bool) -> list[list[int]]:
    """Go on from `root` for some steps and save; the samples of this rank in each."""
    engine = engine_for(Numbers(), size)
    engine.load_checkpoint(root)
    seen = []
    for batch in itertools.islice(engine.training_dataloader, num_steps):
        engine.backward(engine(batch).square().mean())
        engine.step()
        seen.append([int(number) for number in batch.flatten()])
    engine.save_checkpoint(root, asynchronous=asynchronous)
    engine.finish_saving()
    return seen


def test_an_epoch_goes_on_at_any_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    seen: list[int] = []
    for num_ranks, size, num_steps in ((2, 3, 2), (3, 2, 1), (1, 5, 2), (2, 1, 6)):  # 12 + 6 + 10 + 12 samples
        answers = ranks.run(num_ranks, trained, str(tmp_path), size, num_steps, num_ranks == 2)
        seen += [sample for step in zip(*answers, strict=True) for rank in step for sample in rank]
    assert sorted(seen) == list(range(SAMPLES))
    assert seen != sorted(seen)


def refused(root: str) -> tuple[str, bool]:
    """What loading a stream's position at another number of ranks raises; whether the model stayed as it was."""
    engine = engine_for(Stream(), 1)
    before = whole_parameters(engine.module)
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(root)
    after = whole_parameters(engine.module)
    return str(error.value), all(torch.equal(after[name], before[name]) for name in before)


def save_a_stream(root: str) -> None:
    engine = engine_for(Stream(), 1)
    next(iter(engine.training_dataloader))
    with shardwell.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.fill_(0.5)
    engine.save_checkpoint(root)


def test_a_position_that_cannot_be_loaded_leaves_the_model_alone(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, save_a_stream, str(tmp_path))
    message, is_same = ranks.run(1, refused, str(tmp_path))[0]
    assert "saved with 2 rank(s), now there are 1" in message
    assert is_same
