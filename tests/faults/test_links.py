"""A rank that fails wakes all who wait for it, whatever its links and their messages were doing at that moment."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.comm import Agreement, Collectives
from shardwell.comm.ledger import Ledger
from shardwell.comm.mesh import world_mesh
from shardwell.comm.patience import wait_for
from shardwell.errors import PeerError, ShardwellError
from shardwell.memory import Account, Device, Scratch
from tests.models import Gpt, batches, share, zero
from tests.ranks import Ranks

SOON = 4.0  # seconds


def routes() -> Collectives:
    """The collectives of all ranks, on links of their own."""
    home = Device(torch.device("cpu"))
    comm = Collectives(world_mesh(home.torch_device), home, Ledger(), Scratch(home, Account()))
    comm.agreement = Agreement(comm.mesh, SOON, comm.cut_links)
    return comm


def waited(comm: Collectives, flat: torch.Tensor) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        comm.gather(flat, "GATHER all").wait()
    except ShardwellError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}
    return {"error": "", "text": "", "seconds": time.monotonic() - begin}


def cut_in_turn() -> list[str]:
    """Ranks 1 and 0 cut their links, one behind the other; rank 3 waits for rank 0 alone."""
    comm, store = routes(), dist.distributed_c10d._get_default_store()
    comm.barrier()
    rank = comm.mesh.rank
    if rank == 3:
        message = dist.irecv(torch.empty(1), 0, group=comm.mesh.group)
        assert message is not None
        store.set("rank 3 waits", "")
        begin = time.monotonic()
        with pytest.raises(RuntimeError):
            message.wait()
        return ["woken"] if time.monotonic() - begin < SOON else []
    store.wait(["rank 3 waits"])
    if rank == 1:
        comm.cut_links()
        store.set("rank 1 is gone", "")
    if rank == 0:
        store.wait(["rank 1 is gone"])
        with pytest.raises(RuntimeError):
            dist.recv(torch.empty(1), 1, group=comm.mesh.group)  # so that it knows
        comm.cut_links()
    return []


def test_links_are_cut_though_those_of_the_next_rank_are_broken(ranks: Ranks) -> None:
    assert ranks.run(4, cut_in_turn, limit=40)[3] == ["woken"]


def fail_under_way(num_bytes: int) -> dict[str, Any]:
    comm = routes()
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    waited(comm, torch.zeros(2))
    if comm.mesh.rank == 1:
        assert comm.agreement is not None
        comm.gather(flat, "GATHER all")
        comm.agreement.fail(ShardwellError("no more"))
        return {}
    return waited(comm, flat)


def test_a_message_that_is_on_its_way_when_a_rank_fails_is_not_waited_for(ranks: Ranks) -> None:
    """Gloo tells nobody that such a message is lost."""
    found = ranks.run(2, fail_under_way, 1 << 28, limit=60)[0]
    assert (found["error"], found["text"]) == ("PeerError", "rank 1 failed first: no more")
    assert found["seconds"] < SOON


class Stuck:
    def __init__(self) -> None:
        self.over = threading.Event()

    def wait(self) -> None:
        self.over.wait()


def test_who_gives_up_leaves_a_thread_behind_that_serves_others_no_more() -> None:
    stuck, done = Stuck(), Stuck()
    done.over.set()

    def look() -> None:
        raise PeerError("rank 1 failed first")

    with pytest.raises(PeerError, match="rank 1"):
        wait_for([done, stuck], look)
    wait_for([done, done], look)
    stuck.over.set()
    wait_for([done], look)


def test_waiting_for_the_others_can_be_interrupted() -> None:
    """Ctrl-C, say, where a wait of gloo's own would go on until a message comes."""

    def alarm(*_: Any) -> None:
        raise TimeoutError

    stuck, done = Stuck(), Stuck()
    done.over.set()
    before = signal.signal(signal.SIGALRM, alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError):
            wait_for([stuck], lambda: None)
    finally:
        signal.signal(signal.SIGALRM, before)
    wait_for([done], lambda: None)
    stuck.over.set()


def test_what_a_work_raises_goes_up_and_the_next_wait_knows_nothing_of_it() -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("connection closed")

    done = Stuck()
    done.over.set()
    with pytest.raises(RuntimeError, match="connection closed"):
        wait_for([done, Broken(), Stuck()], lambda: None)
    wait_for([done], lambda: None)


def fail_and_forget() -> tuple[str, bool]:
    """What a rank sees when rank 1 fails in backward, and whether its model is still there once that is over."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    def fail() -> tuple[str, Any]:
        torch.manual_seed(0)
        model = Gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(3)).engine
        loss = engine(share(batches(1, 4)[0], rank, num_ranks))
        if rank == 1:
            loss.register_hook(lambda _: 1 / 0)
        try:
            engine.backward(loss)
        except Exception as error:
            return type(error).__name__, weakref.ref(model)
        return "", weakref.ref(model)

    name, model = fail()
    for _ in range(2):  # what autograd's graph held is found behind the graph
        gc.collect()
    return name, model() is not None


def test_a_failed_engine_leaves_nothing_behind(ranks: Ranks) -> None:
    assert ranks.run(2, fail_and_forget, limit=60) == [("PeerError", False), ("ZeroDivisionError", False)]
