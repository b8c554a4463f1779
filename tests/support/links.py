"""Collectives over links that break, and what waiting for them gives."""

from __future__ import annotations

import time
from typing import Any

import torch

from shardwell.errors import ShardwellError
from shardwell.memory import Device, MemoryStats, TemporaryBuffers
from shardwell.parallel import Agreement, Collectives
from shardwell.parallel.mesh import world_mesh
from shardwell.parallel.traffic import TrafficStats

SOON = 4.0  # seconds


def routes() -> Collectives:
    """The collectives of all ranks, on links of their own."""
    home = Device(torch.device("cpu"))
    comm = Collectives(world_mesh(home.torch_device), home, TrafficStats(), TemporaryBuffers(home, MemoryStats()))
    comm.agreement = Agreement(comm.rank_group, SOON, comm.abort_links)
    return comm


def waited(comm: Collectives, flat: torch.Tensor) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        comm.all_gather(flat, "GATHER all").wait()
    except ShardwellError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}
    return {"error": "", "text": "", "seconds": time.monotonic() - begin}
