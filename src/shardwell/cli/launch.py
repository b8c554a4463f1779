"""Starting ranks through torch's elastic agent, on one node or on several that meet at an address.

Knows processes; nothing of engines, and prints nothing while ranks run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from shardwell.cli.ends import NEVER, RanksFailedError, Restarts, RunInterruptedError
from shardwell.errors import ShardwellError

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from shardwell.cli.agent import Agent

_RANK = Path(__file__).with_name("rank.py")
_MEET = 600  # seconds within which all nodes have to come
_LINGER = 2.0  # seconds that a node stays after a failure: the others may meet here, and shall tell their own errors
_ANSWER = timedelta(seconds=60)  # within which the node that the others met at has to answer


@dataclass(frozen=True)
class Place:
    """How many ranks run here, and how they meet ranks on other nodes."""

    ranks_here: int
    min_nodes: int = 1
    max_nodes: int = 1
    master_addr: str = ""
    master_port: int = 29500
    join_time: int = 30  # seconds to wait for more nodes, once there are `min_nodes`

    @property
    def is_alone(self) -> bool:
        return self.max_nodes == 1

    @property
    def endpoint(self) -> str:
        return "localhost:0" if self.is_alone else f"{self.master_addr}:{self.master_port}"


def launch(command: Sequence[str], place: Place, restarts: Restarts = NEVER, *, quiet_ranks: bool = False) -> None:
    """Run `command` (`script args...` or `-m module args...`) on every rank; returns when all have succeeded.

    When a rank fails the others are ended. All are started again as `restarts` allows, then `RanksFailedError` is
    raised; on a signal, `RunInterruptedError`. `quiet_ranks` keeps what ranks print off the terminal.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // place.ranks_here)))
    with tempfile.TemporaryDirectory(prefix="shardwell-") as logs, _no_leftovers(), _quiet_agent():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
        from torch.distributed.elastic.rendezvous import RendezvousError

        from shardwell.cli.agent import Agent

        keep = DefaultLogsSpecs(log_dir=logs, redirects=Std.ALL if quiet_ranks else Std.NONE)
        try:
            _run(Agent(_spec(command, place, restarts), keep, restarts), place)
        except RendezvousError as error:
            raise ShardwellError(_why_nodes_did_not_meet(error, place)) from None
        except SignalException as error:
            raise RunInterruptedError(error.sigval) from None
        except KeyboardInterrupt:
            raise RunInterruptedError(signal.SIGINT) from None


def _run(agent: Agent, place: Place) -> None:
    """Until all ranks have succeeded, or failed once too often."""
    from torch.distributed.elastic.rendezvous import RendezvousClosedError

    try:
        result = agent.run()
    except RendezvousClosedError:
        if not agent.ends:
            raise
        raise RanksFailedError(agent.ends) from None  # another node has no restarts left
    agent.get_worker_group().spec.rdzv_handler.shutdown()
    if result is not None and result.is_failed():
        time.sleep(0.0 if place.is_alone else _LINGER)
        raise RanksFailedError(agent.ends)


def _spec(command: Sequence[str], place: Place, restarts: Restarts) -> WorkerSpec:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    address = _own_address(place)
    return WorkerSpec(
        role="ranks",
        local_world_size=place.ranks_here,
        entrypoint=sys.executable,
        args=(str(_RANK), *command),
        rdzv_handler=_meeting(place, address),
        max_restarts=restarts.limit,
        local_addr=address,
    )


def _meeting(place: Place, address: str) -> RendezvousHandler:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=place.endpoint,
        run_id=uuid.uuid4().hex if place.is_alone else "shardwell",
        min_nodes=place.min_nodes,
        max_nodes=place.max_nodes,
        local_addr=address,
        read_timeout=_MEET,
        join_timeout=_MEET,
        last_call_timeout=place.join_time,
    )
    backend, store = create_backend(parameters)
    store.set_timeout(_ANSWER)
    return create_handler(store, backend, parameters)


def _own_address(place: Place) -> str:
    """What other nodes call this one: the address from which it reaches the meeting point, if that is elsewhere."""
    if place.is_alone:
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(place.master_addr, place.master_port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket sends nothing
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise ShardwellError(
            f"--master-addr {place.master_addr}: cannot be found ({error.strerror}); pass a host name or address that "
            "every node can reach"
        ) from None
    return place.master_addr if own == "::1" or own.startswith("127.") else own


def _why_nodes_did_not_meet(error: Exception, place: Place) -> str:
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

    if isinstance(error, RendezvousTimeoutError):
        return f"fewer than {place.min_nodes} nodes came to {place.endpoint} within {_MEET} s; start this on each node"
    if isinstance(error, RendezvousClosedError):
        return f"the job at {place.endpoint} has ended; see the other nodes for the reason"
    return (
        f"{place.endpoint}, where the nodes meet, cannot be reached: its node has ended, or the port is taken or "
        "blocked; see what is printed there"
    )


@contextlib.contextmanager
def _no_leftovers() -> Iterator[None]:
    """Whatever happens, also a second Ctrl-C while ranks are being ended: no rank outlives its launcher."""
    try:
        yield
    finally:
        import psutil  # type: ignore[import-untyped, unused-ignore]

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """torch's agent logs every end of a rank; here the first failing rank's error says it once."""
    if os.environ.get("SHARDWELL_DEBUG") == "1":
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _num_cores() -> int:
    from shardwell.memory.limits import num_cores

    return num_cores()
