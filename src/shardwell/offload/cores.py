"""The cores that do the updates on the host: those near this rank's GPU, less two for launching and loading data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shardwell.memory.machine import current_machine

_SYSTEM = Path("/sys")
_LEFT = 2  # for the thread that launches, and for a data loader


def allowed_cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def update_cores(
    rank: int, buses: Sequence[str], allowed: Sequence[int] | None = None, system: Path = _SYSTEM
) -> list[int]:
    """Return the cores of a rank of this machine; `buses` are the PCI addresses of the GPUs of all its ranks.

    Ranks whose GPUs are on the same NUMA node share its cores. What the system does not report counts as one node.
    """
    cores = list(allowed_cores() if allowed is None else allowed)
    nodes = [_node_of(bus, system) for bus in buses]
    near = [core for core in cores if core in _cores_of(nodes[rank], system)] or cores
    sharers = [other for other, node in enumerate(nodes) if node == nodes[rank]] if near != cores else range(len(nodes))
    place, num = list(sharers).index(rank), len(sharers)
    first = place * len(near) // num
    share = near[first : max(first + 1, (place + 1) * len(near) // num)]  # more ranks than cores share these evenly
    if allowed is None:
        share = share[: max(1, current_machine().num_cores() // len(nodes))]  # a container may have fewer than it sees
    return share[:-_LEFT] if len(share) > _LEFT else share[:1]


def _node_of(bus: str, system: Path) -> int:
    """Return the NUMA node of a GPU; -1 if it is not known."""
    try:
        return int((system / "bus/pci/devices" / bus.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _cores_of(node: int, system: Path) -> set[int]:
    if node < 0:
        return set()
    try:
        text = (system / f"devices/system/node/node{node}/cpulist").read_text().strip()
        spans = [part.split("-") for part in text.split(",") if part]
        return {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def stay_on(cores: Sequence[int]) -> None:
    """Keep the calling thread, and the threads that it starts, on some cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
