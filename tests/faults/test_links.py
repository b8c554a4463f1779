"""A rank that fails wakes all who wait for it, whatever its links and their messages were doing at that moment."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.errors import PeerError, ShardwellError
from shardwell.parallel import transport
from shardwell.parallel.mesh import world_mesh
from shardwell.parallel.transport import wait_all
from tests.support.command import environment
from tests.support.internals import collectives_of
from tests.support.links import SOON, routes, waited
from tests.support.models import Gpt, batches, share, zero
from tests.support.patience import HANG, soon
from tests.support.ranks import Ranks


def cut_in_turn() -> list[str]:
    """Ranks 1 and 0 cut their links, one behind the other; rank 3 waits for rank 0 alone."""
    comm, store = routes(), dist.distributed_c10d._get_default_store()
    comm.barrier()
    rank = comm.rank_group.rank
    if rank == 3:
        message = dist.irecv(torch.empty(1), 0, group=comm.rank_group.group)
        assert message is not None
        store.set("rank 3 waits", "")
        begin = time.monotonic()
        with pytest.raises(RuntimeError):
            message.wait()
        return ["woken"] if time.monotonic() - begin < soon(SOON) else []
    store.wait(["rank 3 waits"])
    if rank == 1:
        comm.abort_links()
        store.set("rank 1 is gone", "")
    if rank == 0:
        store.wait(["rank 1 is gone"])
        with pytest.raises(RuntimeError):
            dist.recv(torch.empty(1), 1, group=comm.rank_group.group)  # so that it knows
        comm.abort_links()
    return []


def test_links_are_cut_though_those_of_the_next_rank_are_broken(ranks: Ranks) -> None:
    assert ranks.run(4, cut_in_turn)[3] == ["woken"]


def fail_under_way(num_bytes: int) -> dict[str, Any]:
    comm = routes()
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    waited(comm, torch.zeros(2))
    if comm.rank_group.rank == 1:
        assert comm.agreement is not None
        lost = comm.all_gather(flat, "GATHER all")
        comm.agreement.fail(ShardwellError("no more"))
        lost._callbacks.clear()  # nobody will wait for it, which is what this is about
        return {}
    return waited(comm, flat)


def test_a_message_that_is_on_its_way_when_a_rank_fails_is_not_waited_for(ranks: Ranks) -> None:
    """Gloo tells nobody that such a message is lost."""
    found = ranks.run(2, fail_under_way, 1 << 28)[0]
    assert found["error"] == "PeerError"
    assert found["text"].startswith("rank 1 failed first: no more. All ranks stop where one fails")
    assert found["seconds"] < soon(SOON)


def _nothing() -> None:
    """Find no failure."""


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
        wait_all([done, stuck], lambda: look, pytest.fail)
    wait_all([done, done], lambda: look, pytest.fail)
    stuck.over.set()
    wait_all([done], lambda: look, pytest.fail)


@contextlib.contextmanager
def alarm_after(seconds: float, rings: Callable[[], object], raises: type[Exception] = TimeoutError) -> Iterator[None]:
    """A signal whose handler raises an error, as that of Ctrl-C raises a KeyboardInterrupt."""

    def alarm(*_: Any) -> None:
        rings()
        raise raises

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("ends", [True, False])
def test_waiting_for_the_others_can_be_interrupted(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Where a wait of gloo's own would go on until a message comes. What comes soon is waited for, though."""
    stuck, done, abandoned = Stuck(), Stuck(), list[BaseException]()
    done.over.set()
    monkeypatch.setattr(transport, "_GRACE", HANG if ends else 0.5)
    comes_soon = threading.Timer(0.2, stuck.over.set)
    with alarm_after(1.0, comes_soon.start if ends else _nothing), pytest.raises(TimeoutError) as caught:
        wait_all([stuck], lambda: _nothing, abandoned.append)
    assert abandoned == ([] if ends else [caught.value])
    wait_all([done], lambda: _nothing, pytest.fail)
    stuck.over.set()


def interrupted(sends: str, grace: float, raises: type[Exception]) -> dict[str, Any]:
    """A signal on rank 0, that waits for rank 1; what its memory was is used for something else then."""
    comm, store = routes(), dist.distributed_c10d._get_default_store()
    waited(comm, torch.zeros(2))
    if comm.rank_group.rank == 1:
        store.wait([sends], timedelta(seconds=HANG))
        return waited(comm, torch.full((1 << 20,), 5.0)) | waited(comm, torch.full((1 << 20,), 5.0))
    flat = torch.zeros(1 << 20)
    gathering = comm.all_gather(flat, "GATHER all")
    alarm = alarm_after(1.0, lambda: store.set("the alarm rings", ""), raises)
    with pytest.MonkeyPatch.context() as patch, alarm:
        patch.setattr(transport, "_GRACE", grace)
        with pytest.raises(raises) as caught:
            gathering.wait()
        assert type(caught.value) is raises
    had_come = bool((flat[1 << 19 :] == 5.0).all())
    flat.fill_(7.0)
    store.set("rank 0 has given up", "")
    time.sleep(1.0)
    assert (flat == 7.0).all()
    return {"had come": had_come, **waited(comm, torch.zeros(1 << 20))}


@pytest.mark.parametrize("raises", [TimeoutError, RuntimeError], ids=["timeout", "killed worker"])
def test_an_interrupted_wait_leaves_nobody_behind_who_writes_to_its_memory(
    ranks: Ranks, raises: type[Exception]
) -> None:
    """A RuntimeError is what torch's DataLoader raises for a killed worker; collectives fail with that class, too."""
    one, other = ranks.run(2, interrupted, "the alarm rings", HANG, raises)
    assert (one["had come"], one["error"], other["error"]) == (True, "", "")
    one, other = ranks.run(2, interrupted, "rank 0 has given up", 0.3, raises)
    assert (one["had come"], one["error"], other["error"]) == (False, "ShardwellError", "PeerError")
    said = f"rank 0 failed first: {raises.__name__} while rank 0 waited for others. All ranks stop"
    assert other["text"].startswith(said)


def patient(seconds: float) -> list[str]:
    """Rank 1 is late, but there: it is asked whether it is, and nothing comes of that."""
    comm = routes()
    waited(comm, torch.zeros(3))
    if comm.rank_group.rank == 1:
        time.sleep(seconds)
    return [waited(comm, torch.zeros(300))["error"] for _ in range(50)]


def test_a_rank_that_is_late_is_waited_for(ranks: Ranks) -> None:
    assert ranks.run(3, patient, 5.0) == [[""] * 50] * 3


KILLED = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from tests.support.links import routes, waited
from tests.support.patience import soon
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
comm, flat = routes(), torch.zeros(1 << 28, dtype=torch.uint8)
waited(comm, torch.zeros(2))
if comm.rank_group.rank == 1:
    comm.all_gather(flat, "GATHER all")
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
found = waited(comm, flat)
print(found["error"], found["seconds"] < soon(12.0), flush=True)
os._exit(0)
"""


def test_a_rank_that_is_killed_with_a_message_under_way_is_not_waited_for(tmp_path: Path) -> None:
    """It leaves no word, and gloo tells nobody that the message is lost."""
    command = [sys.executable, "-c", KILLED, f"file://{tmp_path}/meeting"]
    options: dict[str, Any] = {"env": environment(root=True), "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank)], **options) for rank in range(2)]
    found = [process.communicate(timeout=HANG)[0] for process in processes]
    assert found == ["PeerError True\n", ""]


def without_a_word() -> dict[str, Any]:
    """Two nodes of two ranks. Rank 3 is gone; rank 0 never hears from it anyway, but from those that do."""
    rank = dist.get_rank()
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = zero(3, zero_optimization={"stage3_param_persistence_threshold": 0})
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
    rows = share(batches(1, 4)[0], rank, 4)
    engine.backward(engine(rows))
    engine.step()
    store, begin, found = dist.distributed_c10d._get_default_store(), time.monotonic(), {}
    if rank == 3:
        collectives_of(engine).abort_links()
    else:
        try:
            engine(rows)
            engine(rows)
        except ShardwellError as error:
            found = {"error": type(error).__name__, "seconds": time.monotonic() - begin}
    if rank:  # who would hear of it only when others are gone has to wait
        store.wait(["rank 0 has heard"], timedelta(seconds=HANG))
    else:
        store.set("rank 0 has heard", "")
    return found


def test_whoever_has_no_link_to_a_lost_rank_is_told_by_those_who_have(ranks: Ranks) -> None:
    for found in ranks.run(4, without_a_word)[:3]:
        assert found["error"] == "PeerError"
        assert found["seconds"] < soon(3 * SOON)


def timeouts() -> list[float]:
    """Of the default group, and of the engine's own."""
    default = dist.distributed_c10d._get_default_group()
    groups = [default, world_mesh(torch.device("cpu")).group]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def with_a_timeout(meeting: str) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a rank that is quick must not cut links that others still make
    dist.destroy_process_group()
    dist.init_process_group("gloo", meeting, rank=rank, world_size=size, timeout=timedelta(seconds=77))
    return timeouts()


def test_the_time_limit_of_the_users_group_holds_for_ours(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, with_a_timeout, f"file://{tmp_path}/meeting") == [[77.0, 77.0]] * 2


def test_what_a_work_raises_goes_up_and_the_next_wait_knows_nothing_of_it() -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("connection closed")

    done = Stuck()
    done.over.set()
    with pytest.raises(RuntimeError, match="connection closed"):
        wait_all([done, Broken(), Stuck()], lambda: _nothing, pytest.fail)
    wait_all([done], lambda: _nothing, pytest.fail)


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
    assert ranks.run(2, fail_and_forget) == [("PeerError", False), ("ZeroDivisionError", False)]


def give_up() -> int:
    """Give up an all-reduce to which rank 1 never comes; return how many owners the process group got."""
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(1)).engine
    collectives = collectives_of(engine)
    group = collectives.rank_group.group
    num_owners = sys.getrefcount(group)
    if dist.get_rank() == 1:
        collectives.agreement.failures.post_message("does not come")
    else:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        with pytest.raises(PeerError, match="does not come"):
            collectives.direct.wait([work])
    return sys.getrefcount(group) - num_owners


def test_a_group_whose_threads_may_wait_for_ever_is_never_freed(ranks: Ranks) -> None:
    """Its destructor would wait for them, in whatever code the garbage collector runs then."""
    assert ranks.run(2, give_up) == [1, 0]
