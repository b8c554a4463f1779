"""Somebody else on the network of a job: finds what listens, and tries what such a person would try.

    python -m tests.campaigns.stranger SEED SECONDS ADDRESS...

Prints one JSON object: how often each thing was tried, and everything that was gained. Knows nothing of the job but the
addresses of its hosts, and the code of the project, which is public.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import random
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

from shardwell.cli.channel import ClosedError, StrangerError, enter, key_of

GREETING = 40  # bytes that the gate says to everybody
PORT = 29500
WAIT = 120.0  # seconds for the job to begin
HALF_OPEN = 40  # connections at once
FLOOD = 400  # connections at once


class Attack:
    """A form of payload that leaves a mark where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {os.environ.get('SHARDWELL_CAMPAIGN_MARK', '/dev/null')}",)


class Stranger:
    """Tries things until its time is over."""

    def __init__(self, seed: int, addresses: list[str]) -> None:
        self.draw = random.Random(seed)
        self.addresses = addresses
        self.tried: Counter[str] = Counter()
        self.gains: list[str] = []
        self.held: list[socket.socket] = []
        self.open: list[tuple[str, int]] = []

    def find(self) -> None:
        """Which ports are open, of those that the system gives to who does not ask for one, and launchers'."""
        for address in self.addresses:
            for first, last in [
                (PORT - 100, PORT + 100),
                *((first, first + 512) for first in range(32768, 61000, 512)),
            ]:
                self._look(address, range(first, last))
                self.tried["ports looked at"] += last - first

    def await_job(self) -> None:
        """Until something listens at the port that launchers take if they are not told another."""
        end = time.monotonic() + WAIT
        while not self.open and time.monotonic() < end:
            for address in self.addresses:
                self._look(address, range(PORT, PORT + 1))
            time.sleep(0.05)

    def _look(self, address: str, ports: range) -> None:
        chosen = selectors.DefaultSelector()
        for port in ports:
            probe = socket.socket()
            probe.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                probe.connect((address, port))
            chosen.register(probe, selectors.EVENT_WRITE, port)
        deadline = time.monotonic() + 1
        while chosen.get_map() and time.monotonic() < deadline:
            for key, _ in chosen.select(0.2):
                probe = key.fileobj  # type: ignore[assignment]
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 and (address, key.data) not in self.open:
                    self.open.append((address, key.data))
                chosen.unregister(probe)
                probe.close()
        for key in list(chosen.get_map().values()):
            chosen.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        chosen.close()

    def store(self, where: tuple[str, int]) -> None:
        """As a client of torch's store: list, read, overwrite."""
        self.tried["clients of torch's store"] += 1
        with contextlib.suppress(Exception):
            store = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
            found = store.list_keys()
            self.gains.append(f"keys at {where}: {found[:3]}")
            for key in found:
                store.set(key, pickle.dumps(Attack()))

    def garbage(self, where: tuple[str, int]) -> None:
        self.tried["garbage"] += 1
        with contextlib.suppress(OSError), socket.create_connection(where, 2) as link:
            link.settimeout(0.1)
            link.sendall(self.draw.randbytes(self.draw.choice([1, 8, 64, 4096, 100_000])))
            self._note(link, where)

    def half_open(self, where: tuple[str, int]) -> None:
        """Says nothing, or the first bytes only, and stays."""
        for _ in range(HALF_OPEN):
            self.tried["half-open connections"] += 1
            with contextlib.suppress(OSError):
                link = socket.create_connection(where, 2)
                link.sendall(self.draw.randbytes(self.draw.choice([0, 1, 31, 63])))
                self.held.append(link)
        while len(self.held) > 300:
            self.held.pop(self.draw.randrange(len(self.held))).close()

    def flood(self, where: tuple[str, int]) -> None:
        self.tried["connections of floods"] += FLOOD
        links = []
        for _ in range(FLOOD):
            link = socket.socket()
            link.setblocking(False)
            with contextlib.suppress(OSError):
                link.connect(where)
            links.append(link)
        time.sleep(0.2)
        for link in links:
            link.close()

    def pickles(self, where: tuple[str, int]) -> None:
        """What torch's own meeting would unpickle, by torch's own protocol and bare."""
        self.tried["pickles"] += 1
        payload = pickle.dumps(Attack())
        key = b"torch.rendezvous.shardwell"
        command = b"\x00" + len(key).to_bytes(8, "little") + key + len(payload).to_bytes(8, "little") + payload
        with contextlib.suppress(OSError), socket.create_connection(where, 2) as link:
            link.settimeout(0.1)
            link.sendall(self.draw.choice([payload, command]))
            self._note(link, where)

    def secret(self, where: tuple[str, int]) -> None:
        """As a launcher, with a secret that is wrong, or none."""
        self.tried["wrong secrets"] += 1
        guess = self.draw.choice([None, self.draw.randbytes(32), b"password12345678"])

        async def come() -> None:
            channel = await enter(*where, key_of(guess))
            self.gains.append(f"let in at {where} with {guess!r}")
            channel.close()

        with contextlib.suppress(OSError, StrangerError, ClosedError):
            asyncio.run(asyncio.wait_for(come(), 3))

    def _note(self, link: socket.socket, where: tuple[str, int]) -> None:
        """More than the greeting, or an answer of a store, is a gain."""
        found = b""
        with contextlib.suppress(OSError):
            while data := link.recv(4096):
                found += data
        if len(found) > GREETING or (found and not found.startswith(b"shardwl1")):
            self.gains.append(f"{len(found)} bytes from {where}: {found[:40]!r}")

    def go_on(self, seconds: float) -> None:
        ways: list[Callable[[tuple[str, int]], None]] = [
            self.store, self.garbage, self.half_open, self.flood, self.pickles, self.secret
        ]  # fmt: skip
        self.await_job()
        end, looks = time.monotonic() + seconds, [0.5, 0.2]  # when half the time is left, and a fifth
        while time.monotonic() < end:
            if looks and end - time.monotonic() < looks[0] * seconds:
                looks.pop(0)
                self.find()  # ranks have opened ports meanwhile
            for way in self.draw.sample(ways, len(ways)):
                if self.open and time.monotonic() < end and (way != self.store or self.draw.random() < 0.2):
                    way(self.draw.choice(self.open))


def main() -> None:
    stranger = Stranger(int(sys.argv[1]), sys.argv[3:])
    stranger.go_on(float(sys.argv[2]))
    stranger.tried["ports found open"] += len(stranger.open)
    print(json.dumps({"tried": stranger.tried, "gains": stranger.gains, "open": sorted(set(stranger.open))}))


if __name__ == "__main__":
    main()
