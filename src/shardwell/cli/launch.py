"""Starts ranks through torch's elastic agent, on one node or on several that meet at an address.

This module knows processes, not engines, and prints nothing while ranks run.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from shardwell.cli.failures import NEVER, RanksFailedError, Restarts, RunInterruptedError
from shardwell.cli.rank import ENDED, LAUNCHER
from shardwell.cli.temporary_folder import kept_folder
from shardwell.errors import ShardwellError
from shardwell.secret import HOW_TO, VARIABLE, job_secret

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from shardwell.cli.agent import Agent
    from shardwell.cli.rendezvous import MultiNodeRendezvous, SingleNodeRendezvous

_RANK = Path(__file__).with_name("rank.py")
_MEET = 600  # seconds within which all nodes must join
_LINGER = 2.0  # seconds that a node stays after a failure, so that others at this gate report their own errors


@dataclass(frozen=True)
class LaunchTopology:
    """The number of ranks that run here, and the place where they meet ranks on other nodes."""

    local_world_size: int
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


def launch(
    command: Sequence[str], place: LaunchTopology, restarts: Restarts = NEVER, *, quiet_ranks: bool = False
) -> None:
    """Run `command` (`script args...` or `-m module args...`) on every rank; return when all have succeeded.

    When a rank fails, the others are ended. All are restarted as `restarts` allows; then `RanksFailedError` is raised.
    A signal raises `RunInterruptedError`. `quiet_ranks` hides the output of ranks.
    """
    secret, address = job_secret(), _own_address(place)
    _check_secret(place, secret)
    with (
        _environment(place, secret, address),
        kept_folder() as logs,
        _ending_ranks(),
        _quiet_agent(),
    ):
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
        from torch.distributed.elastic.rendezvous import RendezvousError

        from shardwell.cli.agent import Agent

        keep = DefaultLogsSpecs(log_dir=logs, redirects=Std.ALL if quiet_ranks else Std.NONE)
        try:
            with contextlib.closing(_meeting(place, secret)) as meeting:
                agent = Agent(_spec(command, place, restarts, meeting), keep, restarts)
                with _passing_on(agent):
                    _run(agent, place)
        except RendezvousError as error:
            raise ShardwellError(_why_nodes_did_not_meet(error, place)) from None
        except SignalException as error:
            raise RunInterruptedError(error.sigval) from None
        except KeyboardInterrupt:
            raise RunInterruptedError(signal.SIGINT) from None


@contextlib.contextmanager
def _passing_on(agent: Agent) -> Iterator[None]:
    """Pass signals that are a script's own on to the ranks, as a batch system sends them before its time limit."""
    before = {}
    with contextlib.suppress(ValueError):  # not in the main thread
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, lambda number, _: agent.pass_on(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(agent: Agent, place: LaunchTopology) -> None:
    """Run the agent until all ranks have succeeded, or no restart is left."""
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


def _spec(
    command: Sequence[str],
    place: LaunchTopology,
    restarts: Restarts,
    meeting: SingleNodeRendezvous | MultiNodeRendezvous,
) -> WorkerSpec:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    return WorkerSpec(
        role="ranks",
        local_world_size=place.local_world_size,
        entrypoint=sys.executable,
        args=(str(_RANK), *command),
        rdzv_handler=meeting,
        max_restarts=restarts.limit,
    )


def _meeting(place: LaunchTopology, secret: bytes | None) -> SingleNodeRendezvous | MultiNodeRendezvous:
    from shardwell.cli.rendezvous import MultiNodeRendezvous, RendezvousTimes, SingleNodeRendezvous

    if place.is_alone:
        return SingleNodeRendezvous()
    nodes = (place.min_nodes, place.max_nodes)
    return MultiNodeRendezvous(
        place.master_addr, place.master_port, nodes, secret, RendezvousTimes(_MEET, place.join_time)
    )


def _own_address(place: LaunchTopology) -> str:
    """Return this node's address for other nodes: the one from which it reaches the meeting point."""
    if place.is_alone:
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(place.master_addr, place.master_port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket sends nothing
            own = str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # the second: no part of a name is that long, or empty
        why = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ShardwellError(
            f"--master-addr {place.master_addr}: cannot be found ({why}); pass a host name or address that every node "
            "can reach"
        ) from None
    if _is_of_no_machine(str(address[0])):
        raise ShardwellError(
            f"--master-addr {place.master_addr}: {address[0]} is not the address of one machine: the launcher there "
            "would listen on all interfaces, and other nodes would not find it; pass the address that every node can "
            "reach (`hostname -I` lists those of this node)"
        )
    if _is_loopback(str(address[0])) and not _is_loopback_name(place.master_addr):
        raise ShardwellError(
            f"--master-addr {place.master_addr}: means {address[0]} on this node, which no other node can reach; pass "
            "the address that the others know it by (`hostname -I` lists those of this node)"
        )
    return own


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_of_no_machine(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    return found.is_unspecified or found.is_multicast


def _is_loopback_name(name: str) -> bool:
    """Tell whether the user chose a meeting point inside this machine."""
    if name == "localhost" or name.startswith("localhost."):
        return True
    try:
        return _is_loopback(name)
    except ValueError:
        return False


def _check_secret(place: LaunchTopology, secret: bytes | None) -> None:
    """Raise if elastic nodes have no secret, because any process could join; warn if fixed nodes have none."""
    if place.is_alone or secret is not None:
        return
    if place.min_nodes < place.max_nodes:
        raise ShardwellError(
            f"--nnodes {place.min_nodes}:{place.max_nodes}: elastic nodes need a secret, or any process could join "
            f"the job: {HOW_TO}"
        )
    Console(stderr=True).print(
        Text(
            f"no secret: any process that reaches {place.endpoint} can join as a node. On a shared network, {HOW_TO}",
            "yellow",
        ),
        soft_wrap=True,
    )


@contextlib.contextmanager
def _environment(place: LaunchTopology, secret: bytes | None, address: str) -> Iterator[None]:
    """Return the environment variables of the ranks, besides those of torch's agent."""
    from shardwell.parallel.attendance import VARIABLE as ROLL_CALL

    news = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _num_cores() // place.local_world_size))),
        LAUNCHER: str(os.getpid()),
        ROLL_CALL: "1",
    }
    if secret is None and place.is_alone:
        news[VARIABLE] = secrets.token_hex(32)  # for this job, which shares its machine with other users
    interface = _interface(address)
    for name in ("GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if place.is_alone else [])):
        if interface and name not in os.environ:
            news[name] = interface  # their links listen where the nodes meet, and not where the host name points
    before = {name: os.environ.get(name) for name in (*news, ENDED)}
    os.environ.update(news)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _interface(address: str) -> str | None:
    """Return the network interface that has an address; None if none has, or it is down."""
    import psutil  # type: ignore[import-untyped, unused-ignore]

    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name in states and states[name].isup and any(one.address == address for one in addresses):
            return str(name)
    return None


def _why_nodes_did_not_meet(error: Exception, place: LaunchTopology) -> str:
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

    if isinstance(error, RendezvousTimeoutError):
        return (
            f"fewer than {place.min_nodes} nodes joined at {place.endpoint} within {_MEET} s; start this on each node"
        )
    if isinstance(error, RendezvousClosedError):
        return f"the job at {place.endpoint} has ended; see the other nodes for the reason"
    return (
        f"{place.endpoint}, where the nodes meet, cannot be reached: its node has ended, or the port is taken or "
        "blocked; see the output there"
    )


@contextlib.contextmanager
def _ending_ranks() -> Iterator[None]:
    """End all ranks after the block, even after a second Ctrl-C while ranks are being ended."""
    try:
        yield
    finally:
        import psutil  # type: ignore[import-untyped, unused-ignore]

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silence torch's agent, which logs every end of a rank: the first failing rank's error is printed once."""
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
