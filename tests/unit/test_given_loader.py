"""A torch DataLoader as `training_data`: its settings count, its data are shared out, and what is dropped is said."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

import shardwell
from shardwell.engine.data_loader import ShardedLoader
from shardwell.engine.user_data_loader import UserDataLoader, loader_like
from shardwell.errors import CheckpointError, ConfigError
from tests.support.datasets import CPU, Numbers, Stream
from tests.support.models import zero


def both(given: DataLoader[Any], size: int | None = None, num_ranks: int = 2) -> list[list[list[int]]]:
    """The batches of one epoch, of each rank."""
    loaders = [loader_like(given, size, rank, num_ranks, CPU, None) for rank in range(num_ranks)]
    return [[torch.as_tensor(batch).tolist() for batch in loader] for loader in loaders]


def test_a_sequence_stays_one_and_each_rank_gets_its_part() -> None:
    assert both(DataLoader(Numbers(8), batch_size=2)) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_shuffled_data_is_shared_out_without_repeats() -> None:
    first, second = both(DataLoader(Numbers(12), batch_size=3, shuffle=True))
    assert sorted(itertools.chain(*first, *second)) == list(range(12))
    assert first != [[0, 1, 2], [6, 7, 8]]


def test_the_configuration_s_batch_size_wins_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shardwell"):
        found = both(DataLoader(Numbers(8), batch_size=4), size=1)
    assert [len(batch) for batch in found[0]] == [1, 1, 1, 1]
    assert "batches have 1 samples, as the configuration says, not its 4" in caplog.text
    assert "are dropped" in caplog.text


def test_collate_fn_and_workers_are_used() -> None:
    given = DataLoader(Numbers(4), batch_size=2, collate_fn=lambda batch: {"sum": sum(batch)}, num_workers=1)
    loader = loader_like(given, None, 0, 1, CPU, None)
    assert loader.options["num_workers"] == 1
    assert list(loader) == [{"sum": 1}, {"sum": 5}]
    mine = loader_like(DataLoader(Numbers(4), batch_size=2), None, 0, 1, CPU, max)
    assert list(mine) == [1, 3]


def test_streams_are_read_as_they_come_and_go_on_behind_what_was_read() -> None:
    for workers in (0, 1):
        given = DataLoader(Stream(5, 7), batch_size=2, num_workers=workers)
        loader = loader_like(given, None, 0, 1, CPU, None)
        batches = [batch.tolist() for batch in loader]
        assert batches == [[5, 6], [7, 8], [9, 10]]
        loader.load_state_dict({"epoch": 0, "position": 2, "seed": 0, "samples": None, "ranks": 1})
        assert [batch.tolist() for batch in loader] == batches[1:]


@pytest.mark.parametrize("kind", ["distributed", "weighted", "batches", "whole"])
def test_loaders_with_samplers_of_their_own_are_handed_through(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    data = Numbers(8)
    made: dict[str, Any] = {
        "distributed": lambda: DataLoader(data, 2, sampler=DistributedSampler(data, 2, 1, shuffle=False)),
        "weighted": lambda: DataLoader(data, 2, sampler=WeightedRandomSampler([0, 0, 0, 0, 0, 0, 0, 1.0], 4)),
        "batches": lambda: DataLoader(data, batch_sampler=[[1, 2], [3]]),
        "whole": lambda: DataLoader(data, batch_size=None),
    }
    with caplog.at_level(logging.INFO, "shardwell"):
        loader = loader_like(made[kind](), 5, 0, 2, CPU, None)
    expected = {"distributed": [[1, 3], [5, 7]], "weighted": [[7, 7], [7, 7]], "batches": [[1, 2], [3]]}
    assert isinstance(loader, UserDataLoader)
    assert [torch.as_tensor(batch).tolist() for batch in loader] == expected.get(kind, list(range(8)))
    assert "it is used as it is" in caplog.text
    assert loader.epoch == 1
    with pytest.raises(ConfigError, match="collate_fn"):
        loader_like(made[kind](), 5, 0, 2, CPU, list)


def test_a_loader_that_was_handed_through_goes_on_behind_its_position() -> None:
    loader = loader_like(DataLoader(Numbers(6), batch_sampler=[[0], [1], [2]]), None, 0, 2, CPU, None)
    next(iter(loader))
    state = loader.state_dict()
    other = loader_like(DataLoader(Numbers(6), batch_sampler=[[0], [1], [2]]), None, 0, 2, CPU, None)
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == [[1], [2]]
    with pytest.raises(CheckpointError, match="at the same number only"):
        other.check_state_dict({**state, "ranks": 3})


def start(data: Any, **config: Any) -> Any:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return shardwell.initialize(
        model=model, optimizer=optimizer, training_data=data, config={**zero(2), **config}, device="cpu"
    )


def test_initialize_takes_a_loader_and_knows_its_batch_size() -> None:
    engine, _, loader, _ = start(DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=3))
    assert isinstance(loader, ShardedLoader)
    assert engine.train_micro_batch_size_per_gpu() == engine.train_batch_size() == 3
    for (rows,) in loader:
        engine.backward(engine(rows).square().mean())
        engine.step()
    assert (engine.global_steps, engine.global_samples) == (4, 12)
    assert start(loader_of_two(), train_micro_batch_size_per_gpu=4)[0].train_batch_size() == 4


def loader_of_two() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2)


def test_what_is_no_data_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training_data: expected a data set .* found a generator"):
        start(i for i in range(3))
