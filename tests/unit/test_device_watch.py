"""The watch for ranks whose device waits: a failed or ended peer is noted, and the communicators are aborted."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from shardwell.errors import PeerError, ShardwellError
from shardwell.parallel import device_watch
from shardwell.parallel.heartbeat import Heartbeat
from shardwell.parallel.peer_failures import PeerFailures
from shardwell.parallel.rank_store import RankStore


class Peers:
    """Two ranks with one store, as `Agreement` has them; what each has cut is noted."""

    def __init__(self) -> None:
        self.store, self.cut = dist.HashStore(), list[int]()
        self.failures = [PeerFailures(rank, (0, 1), lambda rank=rank: self.cut.append(rank)) for rank in (0, 1)]
        for one in self.failures:
            board = RankStore(self.store, lambda error: ShardwellError(str(error)))
            one.use_store(self.store, board, SimpleNamespace(lost=list), lambda: 5)  # type: ignore[arg-type]

    def agreement(self, num_announced: int, behind: dict[int, Heartbeat] | None = None) -> Any:
        tokens = SimpleNamespace(num_announced=num_announced, last="GATHER blocks.1")
        return SimpleNamespace(failures=self.failures[0], tokens=tokens, time_limit=0.0, behind=lambda: behind or {})


def test_a_failure_of_another_rank_is_noted_and_the_communicators_are_aborted() -> None:
    peers = Peers()
    watch = device_watch.DeviceWatch(peers.store)
    watch.look(peers.agreement(5))
    assert peers.cut == []
    peers.failures[1].fail(ShardwellError("row 17 is empty"))
    with pytest.raises(PeerError, match="rank 1 failed first: row 17 is empty"):
        watch.look(peers.agreement(5))
    assert peers.cut == [1, 0]
    with pytest.raises(PeerError, match="row 17 is empty"):
        peers.failures[0].raise_again()  # what the engine's next call does


def test_a_rank_that_ended_is_missed_only_by_what_it_would_have_to_bring() -> None:
    peers = Peers()
    watch = device_watch.DeviceWatch(peers.store)
    peers.failures[1].end("finished after 3 batches")
    watch.look(peers.agreement(5))
    with pytest.raises(PeerError, match="rank 1 finished after 3 batches; rank 0 goes on"):
        watch.look(peers.agreement(6))
    assert peers.cut == [0]


def test_a_slow_rank_is_named_once_nothing_was_announced_for_the_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    peers = Peers()
    watch = device_watch.DeviceWatch(peers.store)
    slow = {1: Heartbeat(3, "in load_rows (data.py:7)", 61.0)}
    with caplog.at_level(logging.WARNING, "shardwell"):
        watch.look(peers.agreement(5, slow))
        assert not caplog.messages
        time.sleep(0.01)
        watch.look(peers.agreement(5, slow))
    expected = "'GATHER blocks.1' is waiting for rank 1, which is in load_rows (data.py:7) for 61 s"
    assert caplog.messages == [expected]
