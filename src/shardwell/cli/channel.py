"""Authenticated messages between the launchers of a job.

Both ends prove that they know the job's secret before anything else is read, and every message carries an
authentication code.

    the gate    "shardwl1" and a random number
    the guest   its own random number, and a code over both
    the gate    another code over both
    then        length, code, bytes; the codes count the messages of each direction

Nothing is encrypted, and nothing is deserialized here. Without a secret the protocol is the same, with a public key.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
import struct
from collections.abc import Awaitable
from typing import TypeVar

from shardwell.secret import derived

_T = TypeVar("_T")
_GREETING = b"shardwl1"
_NUMBER = 32  # bytes that are drawn
_PROOF = 32
_CODE = 16
_HEAD = struct.Struct(">I16s")
MOST = 1 << 16  # bytes of a message
_COUNT = struct.Struct(">Q")
HANDSHAKE = 10.0  # seconds within which a guest has to prove itself
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a host that lost power is noticed in 20 s


class StrangerError(Exception):
    """Raised if the other end does not know the secret, or does not follow the protocol."""


class ClosedError(Exception):
    """Raised if the other end has closed the connection."""


class Channel:
    """One connection between two launchers, after the handshake."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sends: bytes, receives: bytes
    ) -> None:
        self._reader, self._writer = reader, writer
        self._sends, self._receives = sends, receives
        self._num_sent = self._num_heard = 0

    async def send(self, message: bytes) -> None:
        code = _code(self._sends, self._num_sent, message)
        self._num_sent += 1
        self._writer.write(_HEAD.pack(len(message), code) + message)
        try:
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise ClosedError(str(error)) from None

    async def receive(self) -> bytes:
        """Return the next message; raise `ClosedError` at the end."""
        length, code = _HEAD.unpack(await _exactly(self._reader, _HEAD.size))
        if length > MOST:
            raise StrangerError(f"a message of {length} bytes")
        message = await _exactly(self._reader, length)
        if not hmac.compare_digest(code, _code(self._receives, self._num_heard, message)):
            raise StrangerError("a message that was not made by a launcher of this job")
        self._num_heard += 1
        return message

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()


def key_of(secret: bytes | None) -> bytes:
    return derived(secret or b"", "launcher")


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> Channel:
    """Perform the gate's side of the handshake; raise `StrangerError` unless the guest knows the key."""
    _keep_alive(writer)
    ours = os.urandom(_NUMBER)
    writer.write(_GREETING + ours)
    theirs = await _exactly(reader, _NUMBER + _PROOF)
    both = ours + theirs[:_NUMBER]
    if not hmac.compare_digest(theirs[_NUMBER:], _proof(key, "guest", both)):
        raise StrangerError("a guest without the secret")
    writer.write(_proof(key, "gate", both))
    return Channel(reader, writer, _proof(key, "from gate", both), _proof(key, "from guest", both))


async def enter(host: str, port: int, key: bytes) -> Channel:
    """Connect to the gate. Raise OSError if no process listens there."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        return await within(HANDSHAKE, _introduce(reader, writer, key))
    except BaseException:
        writer.close()
        raise


async def _introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> Channel:
    _keep_alive(writer)
    hello = await _exactly(reader, len(_GREETING) + _NUMBER)
    if not hello.startswith(_GREETING):
        raise StrangerError("something else than a launcher listens there")
    ours = os.urandom(_NUMBER)
    both = hello[len(_GREETING) :] + ours
    writer.write(ours + _proof(key, "guest", both))
    try:
        proof = await _exactly(reader, _PROOF)
    except ClosedError:
        raise StrangerError("it does not take this node's secret") from None
    if not hmac.compare_digest(proof, _proof(key, "gate", both)):
        raise StrangerError("it does not know the secret")
    return Channel(reader, writer, _proof(key, "from guest", both), _proof(key, "from gate", both))


async def within(seconds: float, doing: Awaitable[_T]) -> _T:
    """Return what `doing` gives; raise `ClosedError` if it takes longer."""
    try:
        return await asyncio.wait_for(doing, seconds)
    except TimeoutError:
        raise ClosedError(f"no answer within {seconds:g} s") from None


async def _exactly(reader: asyncio.StreamReader, num_bytes: int) -> bytes:
    try:
        return await reader.readexactly(num_bytes)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise ClosedError(str(error)) from None


def _proof(key: bytes, role: str, numbers: bytes) -> bytes:
    return hmac.digest(key, role.encode() + b"\0" + numbers, "sha256")


def _code(key: bytes, number: int, message: bytes) -> bytes:
    return hmac.digest(key, _COUNT.pack(number) + message, "sha256")[:_CODE]


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    """Let the kernel detect that the other host has failed, and send small messages immediately."""
    link: socket.socket = writer.get_extra_info("socket")
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
