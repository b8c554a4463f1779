"""The store of a job's ranks: torch's TCPStore has no authentication, so it listens on the loopback address only."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

ADDRESS = "127.0.0.1"
_BACKLOG = 1024


def host_store(timeout: timedelta) -> TCPStore:
    """Start a new store at a free port."""
    listener = listening()
    port = listener.getsockname()[1]
    return TCPStore(
        ADDRESS,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def reach_store(port: int, timeout: timedelta) -> TCPStore:
    """Return a client of the store at a port of this machine."""
    return TCPStore(ADDRESS, port, is_master=False, wait_for_workers=False, timeout=timeout)


def listening() -> socket.socket:
    """Return a listening socket that only processes of this machine can reach."""
    return bound(socket.AF_INET, (ADDRESS, 0))


def bound(family: int, address: tuple[object, ...]) -> socket.socket:
    """Return a listening socket at an address. Raise OSError if the address is not this machine's, or in use."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port is free again as soon as its owner ends
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
