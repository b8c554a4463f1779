"""A check that all ranks arrive, before torch makes them wait for each other.

Ranks would wait until torch's timeout, half an hour, for a rank whose script ends without an error before it arrives
here. The launcher sees that rank end, and writes this to the ranks' store. Other launchers do not write it, and then
nothing is checked.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

from shardwell.errors import PeerError
from shardwell.parallel.rank_store import Pause, arrive, has_all

ANY_ENDED = "ended/any"  # a rank has ended, says the launcher: only then ranks look which one
LAUNCHERS_WORDS = "launcher"  # prefix of the keys that the launcher writes to the ranks' store
VARIABLE = "SHARDWELL_ROLL_CALL"  # set by a launcher that writes which ranks have ended
_HERE = "shardwell/here"
_USUAL = timedelta(minutes=30)  # torch's default


def ended_key(rank: int) -> str:
    """Return the key under which the launcher writes that a rank has ended without an error."""
    return f"ended/{rank}"


def await_all_ranks(timeout: timedelta | None) -> None:
    """Return when every rank has arrived, or after the timeout, which torch then reports; raise if a rank has ended."""
    if os.environ.get(VARIABLE) != "1" or (size := int(os.environ["WORLD_SIZE"])) == 1:
        return
    rank, limit = int(os.environ["RANK"]), timeout or _USUAL
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
    store.set(f"{_HERE}/{rank}", "")
    if arrive(store, _HERE, rank, size):
        return
    deadline, pause = time.monotonic() + limit.total_seconds(), Pause(size)
    while not has_all(store, _HERE) and time.monotonic() < deadline:
        pause()
        if not store.check([f"{LAUNCHERS_WORDS}/{ANY_ENDED}"]):
            continue
        ended = [other for other in range(size) if store.check([f"{LAUNCHERS_WORDS}/{ended_key(other)}"])]
        ended = [other for other in ended if not store.check([f"{_HERE}/{other}"])]  # it may have come before
        if ended:
            raise PeerError(
                f"rank {ended[0]} ended, without an error, before it came to `initialize`, where rank {rank} waits for "
                "it. Let all ranks of a script get there, or none"
            )
