"""What is begun is ended; what is dropped is found."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell.memory import MemoryStats, StateKind, TemporaryBuffers
from shardwell.memory.device import Device
from shardwell.parallel.hierarchical import HierarchicalTransport
from shardwell.parallel.transport import Work
from tests.support import leaks
from tests.support.internals import temporary_buffers_of


def test_work_that_nobody_waited_for_is_found_with_its_place() -> None:
    temporary = TemporaryBuffers(Device("cpu"), MemoryStats())
    Work(lambda: None)
    gc.collect()
    (words,) = leaks.said()
    assert "nobody waited" in words
    assert "test_pending.py" in words
    assert temporary is not None


def test_work_that_was_waited_for_or_never_begun_is_no_matter() -> None:
    temporary = TemporaryBuffers(Device("cpu"), MemoryStats())
    Work(lambda: None).then(lambda: None).wait()
    Work(lambda: None).then_start(lambda: Work(lambda: None)).wait()
    Work()
    gc.collect()
    assert temporary is not None
    assert not leaks.said()


def test_what_dies_with_its_engine_is_no_matter() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    engine = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).engine
    engine.backward(engine(torch.ones(1, 4)).sum())
    del engine, model
    gc.collect()
    assert not leaks.said()


def test_memory_that_a_step_does_not_give_back_is_found_with_its_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    engine = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).engine
    kept = temporary_buffers_of(engine).allocate(8, torch.float32, StateKind.STAGING, "(staging)")
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    (words,) = leaks.said()
    assert "staging of '(staging)' were not given back" in words
    assert "test_memory_that_a_step_does_not_give_back" in words
    temporary_buffers_of(engine).free(kept)
    engine.zero_grad()
    assert not leaks.said()


class Nothing:
    """A transport that moves nothing."""

    def all_gather(self, flat: Tensor) -> Work:
        return Work()

    def reduce_scatter(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        return Work()


@pytest.mark.parametrize("host_waits", [False, True])
def test_who_waits_for_the_second_hop_ends_the_first(host_waits: bool) -> None:
    ended: list[str] = []
    temporary = TemporaryBuffers(Device("cpu"), MemoryStats())
    hops = HierarchicalTransport(
        Nothing(), Nothing(), temporary, node_size=2, local_rank=0, host_starts_hops=host_waits
    )
    first = Work(lambda: ended.append("first"))
    both = hops._followed(first, lambda: Work(lambda: ended.append("second")))
    assert not ended, "the host waited"
    both.wait()
    assert sorted(ended) == ["first", "second"]


def test_callbacks_are_called_once_and_in_order_also_over_two_hops() -> None:
    called: list[int] = []
    first = Work(lambda: called.append(1)).then(lambda: called.append(2))
    both = first.then_start(lambda: Work(lambda: called.append(3))).then(lambda: called.append(4))
    assert both.start_next_hop()
    assert called == [1, 2]
    assert not both.start_next_hop()
    both.wait()
    both.wait()
    assert called == [1, 2, 3, 4]


def test_what_follows_a_callback_that_raises_is_not_called() -> None:
    called: list[int] = []

    def fail() -> None:
        raise ValueError

    plain = Work(fail).then(lambda: called.append(1))
    two_hops = Work(fail).then_start(Work).then(lambda: called.append(1))
    for work in (plain, two_hops):
        with pytest.raises(ValueError):
            work.wait()
        work.wait()
        assert work.is_done
    assert not called
