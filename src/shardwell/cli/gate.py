"""The one port of a multi-node job that other machines can reach, on the node of --master-addr.

Launchers authenticate by the job's secret (`channel.py`) and request either a rendezvous (`rounds.py`) or a connection
to the store of a round's ranks, which listens on the loopback address. No input is unpickled: messages are JSON, and
bytes for the store go to torch's store. A connection that does not authenticate in time is closed, and the number of
such connections is limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
import uuid
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

from shardwell.cli.channel import HANDSHAKE, MOST, Channel, ClosedError, StrangerError, admit, within
from shardwell.cli.loopback import ADDRESS, host_store
from shardwell.cli.rounds import Rounds

_T = TypeVar("_T")
_MOST_STRANGERS = 128  # connections that have not proved themselves yet; the oldest gives way
_CLOSE = 5.0  # seconds
MEET, STORE = "meet", "store"


class Background:
    """A thread with an event loop, which runs beside torch's agent."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="shardwell-launcher", daemon=True)
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, _T], limit: float | None = None) -> _T:
        """Run `work` on the thread, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(limit)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.do(self._cancel(), _CLOSE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE)

    async def _cancel(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(lambda *_: None)  # errors of broken connections reach those that use them
        self._loop.run_forever()
        self._loop.close()


class Connection:
    """A connected node."""

    _numbers = itertools.count()

    def __init__(self, address: str, is_host: bool) -> None:
        self.order = (not is_host, address, next(Connection._numbers))


class Gate:
    """The gate of one job. All its methods but the constructor run in a `Background`."""

    _server: asyncio.Server

    def __init__(self, rounds: Rounds, nodes: str, key: bytes, timeout: timedelta) -> None:
        self._rounds, self._nodes, self._key, self._timeout = rounds, nodes, key, timeout
        self._run = uuid.uuid4().hex
        self._stores: dict[int, TCPStore] = {}  # of the round that runs, by its number
        self._strangers: dict[asyncio.Task[Any], None] = {}  # in order of arrival

    async def open(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._welcome, sock=listener)

    async def close(self) -> None:
        self._server.close()
        self._stores = {}

    def store_port(self, number: int) -> int | None:
        store = self._stores.get(number)
        return None if store is None else int(store.port)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._strangers) >= _MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        self._strangers[task] = None
        try:
            channel = await within(HANDSHAKE, admit(reader, writer, self._key))
            wish = _parsed(await within(HANDSHAKE, channel.receive()))
            self._strangers.pop(task, None)
            if wish.get("do") == STORE:
                await self._lead_to_store(channel, wish.get("round"))
            elif wish.get("do") == MEET:
                await self._meet(channel, wish, str(writer.get_extra_info("peername")[0]))
        except (StrangerError, ClosedError, OSError):
            pass  # the peer closed, or did not authenticate; it gets no answer
        finally:
            self._strangers.pop(task, None)
            with contextlib.suppress(Exception):
                writer.close()

    async def _lead_to_store(self, channel: Channel, number: Any) -> None:
        port = self.store_port(number) if isinstance(number, int) else None
        if port is not None:
            await splice(channel, *await asyncio.open_connection(ADDRESS, port))

    async def _meet(self, channel: Channel, wish: dict[str, Any], address: str) -> None:
        if wish.get("nodes") != self._nodes:
            refusal = f"--nnodes {wish.get('nodes')}: the node where the others meet was started with {self._nodes}"
            await channel.send(json.dumps({"refused": refusal}).encode())
            return
        guest = Connection(address, wish.get("host") is True)
        try:
            await channel.send(json.dumps({"run": self._run}).encode())
            while True:
                asked = _parsed(await channel.receive()).get("do")
                await channel.send(json.dumps(self._answer(guest, asked)).encode())
        finally:
            self._rounds.leave(guest, time.monotonic())

    def _answer(self, guest: Connection, asked: Any) -> dict[str, Any]:
        if asked == "join":
            self._rounds.join(guest)
        elif asked == "close":
            self._rounds.is_closed = True
        now = time.monotonic()
        if not self._rounds.is_closed and (number := self._rounds.advance(now)) is not None:
            self._stores = {number: host_store(self._timeout)}  # no rank uses the store before it any more
        found = self._rounds.rank_of(guest)
        return {
            "closed": self._rounds.is_closed,
            "waiting": self._rounds.num_waiting(now),
            "seat": None if found is None else [found.round, found.rank, found.size],
        }


async def splice(channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes both ways until one end closes."""

    async def out() -> None:
        while data := await reader.read(MOST):
            await channel.send(data)

    async def back() -> None:
        while True:
            writer.write(await channel.receive())
            await writer.drain()

    ways = [asyncio.ensure_future(out()), asyncio.ensure_future(back())]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        channel.close()
        with contextlib.suppress(Exception):
            writer.close()


def _parsed(message: bytes) -> dict[str, Any]:
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        raise StrangerError("not JSON") from None
    if not isinstance(found, dict):
        raise StrangerError("not an object")
    return found
