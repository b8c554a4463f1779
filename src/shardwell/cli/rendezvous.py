"""The rendezvous of a job's launchers, as an interface for torch's elastic agent.

`SingleNodeRendezvous` serves a job of one node, `MultiNodeRendezvous` a job of several.

Torch's own rendezvous of several nodes keeps its state in a store without authentication, and unpickles it. Here the
nodes meet at a gate (`gate.py`) instead. On each node the store of the ranks has a loopback address. On the node of
--master-addr it is the store itself; on other nodes the launcher forwards every connection through the gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined, unused-ignore]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from shardwell.cli.channel import Channel, ClosedError, StrangerError, enter, key_of, within
from shardwell.cli.gate import MEET, STORE, Background, Gate, splice
from shardwell.cli.loopback import ADDRESS, bound, host_store, listening, reach_store
from shardwell.cli.rounds import Rounds
from shardwell.errors import ShardwellError
from shardwell.long_work import LongWait
from shardwell.parallel.attendance import LAUNCHERS_WORDS

_TIMEOUT = timedelta(seconds=60)  # within which a store has to answer the launcher
_CLOSE = 5.0  # seconds
_RETRY = 0.2  # seconds
_LOOK = 0.5  # seconds between questions whether other nodes wait
_STRANGE = 8.0  # seconds until a refusal by the gate is final: a flood of connections may push this one out


@dataclass(frozen=True)
class RendezvousTimes:
    """The times that nodes wait for each other, in seconds."""

    meet: float  # within which the smallest number of nodes must join
    join: float  # for more, once there are the least


class _Handler(RendezvousHandler):
    """The methods that torch's agent calls on both."""

    _run_id: str

    def get_backend(self) -> str:
        return "shardwell"

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the launcher's store: yes, so that none of them opens one that others could reach."""
        return True

    def get_run_id(self) -> str:
        return self._run_id


class SingleNodeRendezvous(_Handler):
    """The rendezvous of one node: a new store for each start, because ranks would read old keys as answers."""

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = host_store(_TIMEOUT)
        return _info(self._store, self._store.port, 0, 1)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no other node."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True

    def close(self) -> None:
        self._store = None


class MultiNodeRendezvous(_Handler):
    """The rendezvous of several nodes, a fixed number or a range of them."""

    def __init__(
        self, address: str, port: int, nodes: tuple[int, int], secret: bytes | None, times: RendezvousTimes
    ) -> None:
        self._address, self._port, self._times = address, port, times
        self._nodes = ":".join(map(str, nodes))
        self._key = key_of(secret)
        self._background = Background()
        self._gate: Gate | None = None
        listener = _listener(address, port)
        if listener is not None:
            rounds = Rounds(*nodes, times.join)
            self._gate = Gate(rounds, self._nodes, self._key, _TIMEOUT)
            self._background.do(self._gate.open(listener))
        self._channel: Channel | None = None
        self._run_id = "shardwell"  # until the gate sends it
        self._store: TCPStore | None = None
        self._relay: asyncio.Server | None = None
        self._looked, self._num_waiting = 0.0, 0

    def next_rendezvous(self) -> RendezvousInfo:
        deadline = time.monotonic() + self._times.meet
        if self._channel is None:
            self._channel = self._background.do(self._enter(deadline))
        self._looked = 0.0
        answer = self._ask("join")
        wait = LongWait(f"waiting at {self._address}:{self._port} for the other nodes (--nnodes {self._nodes})")
        while not answer["closed"] and answer["seat"] is None:
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError
            time.sleep(_RETRY)
            wait.look()
            answer = self._ask("look")
        if answer["closed"]:
            raise RendezvousClosedError
        number, rank, size = answer["seat"]
        port = self._store_port(number)
        self._store = reach_store(port, _TIMEOUT)
        return _info(self._store, port, rank, size)

    def num_nodes_waiting(self) -> int:
        if time.monotonic() - self._looked < _LOOK:
            return self._num_waiting
        answer = self._ask("look")
        if answer["closed"]:
            raise RendezvousClosedError  # a node has failed for good; the ranks here may not know yet
        self._looked, self._num_waiting = time.monotonic(), int(answer["waiting"])
        return self._num_waiting

    def is_closed(self) -> bool:
        return bool(self._ask("look")["closed"])

    def set_closed(self) -> None:
        self._ask("close")

    def shutdown(self) -> bool:
        if self._channel is None:
            return True
        try:
            self._ask("close")
        except RendezvousConnectionError:
            return False
        return True

    def close(self) -> None:
        """Close the gate and the connections."""
        self._store = None
        with contextlib.suppress(Exception):
            self._background.do(self._leave(), _CLOSE)
        self._background.close()

    async def _leave(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._relay is not None:
            self._relay.close()
        if self._gate is not None:
            await self._gate.close()

    # ------------------------------------------------------------------------------------------- through the gate

    async def _enter(self, deadline: float) -> Channel:
        """Return a channel to the gate, which may open later than this; raise when it turns this node away."""
        turned_away: float | None = None
        wait = LongWait(
            f"waiting for the launcher at {self._address}:{self._port}, where the nodes meet: does it run there, can "
            "this node reach the port (--master-addr, --master-port), and does no other process use it?"
        )
        while True:
            try:
                channel = await enter(self._address, self._port, self._key)
                wish = {"do": MEET, "nodes": self._nodes, "host": self._gate is not None}
                answer = await _asked(channel, wish)
                break
            except StrangerError as error:
                now = time.monotonic()
                turned_away = now if turned_away is None else turned_away
                if now - turned_away > _STRANGE:
                    raise ShardwellError(self._why_not(error)) from None
            except (OSError, ClosedError):
                turned_away = None
            wait.look()
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError
            await asyncio.sleep(_RETRY)
        if "refused" in answer:
            raise ShardwellError(str(answer["refused"]))
        self._run_id = str(answer["run"])
        return channel

    def _why_not(self, error: StrangerError) -> str:
        return (
            f"{self._address}:{self._port}, where the nodes meet: {error}; give every node the same secret "
            "(SHARDWELL_SECRET or SHARDWELL_SECRET_FILE), and choose a port that no other process uses"
        )

    def _ask(self, what: str) -> dict[str, Any]:
        assert self._channel is not None
        try:
            return self._background.do(_asked(self._channel, {"do": what}))
        except (ClosedError, StrangerError) as error:
            raise RendezvousConnectionError(str(error)) from None

    def _store_port(self, number: int) -> int:
        """Return a port of this machine that leads to the store of a round."""
        if self._gate is not None:
            port = self._gate.store_port(number)
            if port is None:
                raise RendezvousConnectionError("the round is over")
            return port
        return self._background.do(self._open_relay(number))

    async def _open_relay(self, number: int) -> int:
        if self._relay is not None:
            self._relay.close()
        listener = listening()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                channel = await enter(self._address, self._port, self._key)
                await channel.send(json.dumps({"do": STORE, "round": number}).encode())
                await splice(channel, reader, writer)
            except (OSError, ClosedError, StrangerError):
                with contextlib.suppress(Exception):
                    writer.close()  # the rank sees that the store is closed

        self._relay = await asyncio.start_server(carry, sock=listener)
        return int(listener.getsockname()[1])


async def _asked(channel: Channel, wish: dict[str, Any]) -> dict[str, Any]:
    await channel.send(json.dumps(wish).encode())
    answer: dict[str, Any] = json.loads(await within(_TIMEOUT.total_seconds(), channel.receive()))
    return answer


def _listener(address: str, port: int) -> socket.socket | None:
    """Return a socket at `address`; None if it is another machine's, or another launcher here uses it."""
    for family, _, _, _, where in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError):
            return bound(family, where)
    return None


def _info(store: TCPStore, port: int, rank: int, size: int) -> RendezvousInfo:
    return RendezvousInfo(PrefixStore(LAUNCHERS_WORDS, store), rank, size, RendezvousStoreInfo(ADDRESS, port))
