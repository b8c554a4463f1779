from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from shardwell.engine.data_loader import ShardedLoader
from shardwell.errors import CheckpointError, ShardwellError
from tests.support.datasets import CPU, Numbers, Stream


def loader(data: Dataset[Any], size: int = 1, rank: int = 0, num_ranks: int = 1, seed: int = 0) -> ShardedLoader:
    return ShardedLoader(data, size, rank, num_ranks, CPU, collate_fn=list, seed=seed)


def order(length: int, epoch: int = 0, seed: int = 0) -> list[int]:
    """All samples of an epoch as one rank sees them."""
    one = loader(Numbers(length), seed=seed)
    one.load_state_dict(state(epoch, 0, seed, length))
    return [sample for batch in one for sample in batch]


def state(epoch: int, position: int, seed: int, samples: int | None, ranks: int = 1) -> dict[str, Any]:
    return {"epoch": epoch, "position": position, "seed": seed, "samples": samples, "ranks": ranks}


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


# --- order ------------------------------------------------------------------------------------------------------


def test_an_epoch_is_a_permutation_of_its_own() -> None:
    first, second = order(50, 0), order(50, 1)
    assert sorted(first) == sorted(second) == list(range(50))
    assert len({tuple(first), tuple(second), tuple(range(50))}) == 3


def test_a_seed_and_an_epoch_do_not_add_up() -> None:
    assert order(50, epoch=1, seed=0) != order(50, epoch=0, seed=1)


def test_ranks_share_each_micro_batch_without_padding() -> None:
    ranks = [list(loader(Numbers(11), 2, rank, 2)) for rank in range(2)]
    assert flat([batch for step in zip(*ranks, strict=True) for batch in step]) == order(11)[:8]


def test_the_length_counts_whole_micro_batches_of_all_ranks() -> None:
    one = loader(Numbers(11), 2, 0, 2)
    assert len(one) == len(list(one)) == 2


def test_the_users_random_numbers_stay_as_they_are() -> None:
    for data in (Numbers(8), Stream(0, 8)):
        torch.manual_seed(3)
        expected = torch.rand(())
        torch.manual_seed(3)
        next(iter(loader(data)))
        assert torch.rand(()) == expected


def test_batches_are_collated_as_torch_does_it() -> None:
    (batch,) = ShardedLoader(Numbers(3), 3, 0, 1, CPU)
    assert isinstance(batch, torch.Tensor)
    assert sorted(batch.tolist()) == [0, 1, 2]


def test_a_data_set_that_fills_no_micro_batch_is_an_error() -> None:
    with pytest.raises(ShardwellError, match=r"has 3 samples, fewer than the 4 .* \(2 rank\(s\) with 2"):
        next(iter(loader(Numbers(3), 2, 0, 2)))


# --- loops and epochs -------------------------------------------------------------------------------------------


def test_each_loop_is_the_next_epoch() -> None:
    one = loader(Numbers(6))
    assert [flat(list(one)) for _ in range(3)] == [order(6, epoch) for epoch in range(3)]
    assert one.state_dict() == state(3, 0, 0, 6)


def test_a_new_loop_after_a_break_is_the_next_epoch() -> None:
    one = loader(Numbers(6))
    for _ in one:
        break
    assert flat(list(one)) == order(6, 1)


def test_a_loop_that_took_nothing_costs_no_epoch() -> None:
    one = loader(Numbers(6))
    iter(one)
    assert flat(list(one)) == order(6, 0)


def test_a_break_after_the_last_batch_is_the_end_of_the_epoch() -> None:
    one = loader(Numbers(6), 2)
    assert len(list(itertools.islice(one, 3))) == 3
    assert flat(list(one)) == order(6, 1)


def test_a_state_of_the_last_batch_goes_on_with_the_next_epoch() -> None:
    one, other = loader(Numbers(7), 2), loader(Numbers(7), 2)
    list(itertools.islice(one, 3))
    assert one.state_dict()["position"] == 6
    other.load_state_dict(one.state_dict())
    assert flat(list(other)) == order(7, 1)[:6]


def test_only_the_first_loop_after_a_load_goes_on() -> None:
    one = loader(Numbers(6), 2)
    one.load_state_dict(state(4, 2, 9, 6))
    assert flat(list(one)) == order(6, 4, seed=9)[2:]
    assert flat(list(one)) == order(6, 5, seed=9)


def test_an_iterator_that_was_made_before_a_load_goes_on_if_it_gave_nothing_yet() -> None:
    one = loader(Numbers(6), 2)
    batches = iter(one)
    one.load_state_dict(state(1, 4, 0, 6))
    assert flat(list(batches)) == order(6, 1)[4:]


@pytest.mark.parametrize("by_loading", [True, False])
def test_an_old_loop_is_not_mixed_with_a_new_one(by_loading: bool) -> None:
    one = loader(Numbers(6))
    old = iter(one)
    next(old)
    if by_loading:
        one.load_state_dict(one.state_dict())
    else:
        next(iter(one))
    with pytest.raises(ShardwellError, match="went on with an earlier loop"):
        next(old)


def test_a_batch_counts_when_it_is_handed_out() -> None:
    one = loader(Numbers(8), 2, 0, 2)
    found = [one.state_dict()["position"]] + [one.state_dict()["position"] for _ in one]
    assert found == [0, 4, 8]


# --- going on ---------------------------------------------------------------------------------------------------


def resumed(saved: dict[str, Any] | None, length: int, ranks: int, size: int, stop: int) -> tuple[Any, list[int]]:
    """At most `stop` batches of each rank: the state after them, which all ranks share, and the samples in order."""
    loaders = [loader(Numbers(length), size, rank, ranks, seed=7) for rank in range(ranks)]
    for one in loaders:
        if saved is not None:
            one.load_state_dict(saved)
    taken = [list(itertools.islice(one, stop)) for one in loaders]
    states = [json.loads(json.dumps(one.state_dict())) for one in loaders]
    assert all(other == states[0] for other in states)
    return states[0], flat([batch for step in zip(*taken, strict=True) for batch in step])


@given(
    length=st.integers(12, 60),
    phases=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12)), min_size=1, max_size=6),
)
def test_any_change_of_ranks_and_batches_sees_a_prefix_of_each_epoch(
    length: int, phases: list[tuple[int, int, int]]
) -> None:
    saved: dict[str, Any] | None = None
    seen: dict[int, list[int]] = {}
    epoch = position = 0
    for ranks, size, stop in phases:
        stride = ranks * size
        if position + stride > length:
            epoch, position = epoch + 1, 0
        num_batches = min(stop, (length - position) // stride)
        saved, samples = resumed(saved, length, ranks, size, stop)
        assert len(samples) == num_batches * stride
        seen.setdefault(epoch, []).extend(samples)
        position += len(samples)
        if stop > num_batches:  # the loop has ended by itself
            epoch, position = epoch + 1, 0
        assert (saved["epoch"], saved["position"]) == (epoch, position)
    for number, samples in seen.items():
        assert len(set(samples)) == len(samples)
        assert samples == order(length, number, seed=7)[: len(samples)]


def test_another_data_set_starts_the_next_epoch() -> None:
    one = loader(Numbers(7))
    with pytest.warns(UserWarning, match="was 6 samples, now it is 7 samples: .* going on with the next epoch"):
        one.load_state_dict(state(2, 3, 0, 6))
    assert flat(list(one)) == order(7, 3)


@pytest.mark.parametrize(
    "broken", [{"epoch": -1}, {"position": 1.5}, {"seed": None}, {"samples": True}, {"ranks": "2"}]
)
def test_a_broken_state_is_refused_and_changes_nothing(broken: dict[str, Any]) -> None:
    (key,) = broken
    one = loader(Numbers(6))
    with pytest.raises(CheckpointError, match=f"{key}: expected a whole number"):
        one.load_state_dict({**state(1, 2, 3, 6), **broken})
    assert one.state_dict() == state(0, 0, 0, 6)


# --- streams ----------------------------------------------------------------------------------------------------


def test_a_stream_goes_on_where_this_rank_was() -> None:
    one = loader(Stream(100, 11), 2, rank=1, num_ranks=2)
    assert flat(list(itertools.islice(one, 2))) == [100, 101, 102, 103]
    assert one.state_dict() == state(0, 4, 0, None, 2)
    other = loader(Stream(100, 11), 3, rank=1, num_ranks=2)
    other.load_state_dict(one.state_dict())
    assert flat(list(other)) == [104, 105, 106, 107, 108, 109]
    assert flat(list(other)) == [100, 101, 102, 103, 104, 105, 106, 107, 108]


def test_a_stream_does_not_go_on_at_another_number_of_ranks() -> None:
    three = loader(Stream(0, 8), num_ranks=3)
    with pytest.raises(CheckpointError, match=r"saved with 2 rank\(s\), now there are 3"):
        three.load_state_dict(state(0, 1, 0, None, 2))
    three.load_state_dict(state(1, 0, 0, None, 2))  # at the start of an epoch there is nothing to skip
    assert flat(list(three)) == list(range(8))


def test_the_position_in_a_stream_is_none_in_a_data_set_with_indices() -> None:
    one = loader(Numbers(8))
    with pytest.warns(UserWarning, match="was a stream, now it is 8 samples"):
        one.load_state_dict(state(0, 5, 0, None))
    assert flat(list(one)) == order(8, 1)
