"""Whether all ranks come, before torch makes them wait for each other.

A rank whose script ends well before it comes here would be waited for until torch's time limit, half an hour. The
launcher sees it end, and says so in the ranks' store; under other launchers nobody says it, and nothing is asked.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

from shardwell.errors import PeerError

LAUNCHERS_WORDS = "launcher"  # what the launcher writes into the ranks' store begins with this
VARIABLE = "SHARDWELL_ROLL_CALL"  # set by a launcher that says which ranks have ended
_HERE = "shardwell/here"
_USUAL = timedelta(minutes=30)  # torch's own
_LONGEST = 0.2  # seconds between looks


def ended_key(rank: int) -> str:
    """Where the launcher says that a rank has ended without an error."""
    return f"ended/{rank}"


def await_all_ranks(timeout: timedelta | None) -> None:
    """Return when every rank is here, or after the time limit, which torch will tell; raise if one has ended."""
    if os.environ.get(VARIABLE) != "1" or (size := int(os.environ["WORLD_SIZE"])) == 1:
        return
    rank, limit = int(os.environ["RANK"]), timeout or _USUAL
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
    store.set(f"{_HERE}/{rank}", "")
    deadline, pause = time.monotonic() + limit.total_seconds(), 0.001
    missing = [other for other in range(size) if other != rank]
    while missing and time.monotonic() < deadline:
        missing = [other for other in missing if not store.check([f"{_HERE}/{other}"])]
        ended = [other for other in missing if store.check([f"{LAUNCHERS_WORDS}/{ended_key(other)}"])]
        ended = [other for other in ended if not store.check([f"{_HERE}/{other}"])]  # it came, and ended, meanwhile
        if ended:
            raise PeerError(
                f"rank {ended[0]} ended, without an error, before it came to `initialize`, where rank {rank} waits for "
                "it. Let all ranks of a script get there, or none"
            )
        if missing:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
