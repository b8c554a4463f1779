"""The ranks, and how they are grouped: all of them, and those of one node."""

from __future__ import annotations

import contextlib
import enum
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from shardwell.memory.device import num_gpus
from shardwell.parallel.attendance import await_all_ranks

_USUAL_TIMEOUT = 1800.0  # torch's own


class Axis(enum.Enum):
    """A way to split over ranks."""

    WORLD = "world"  # over all ranks
    NODE = "node"  # over the ranks of one node; every node holds a copy

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere


@dataclass(frozen=True)
class RankGroup:
    """One axis' group of ranks, as this rank sees it."""

    rank: int
    size: int
    node_size: int  # ranks of a node; of the last one there may be fewer
    backend: str  # "gloo", "nccl", "fake"; "none" for one process
    group: Any = None  # a torch process group; None stands for the default one
    ranks: tuple[int, ...] = ()  # global ranks, for broadcast and point-to-point; empty: 0..size-1
    local_world_size: int = 1  # that share this machine's memory and drives, as the launcher says

    def is_same_node(self, rank: int) -> bool:
        """Whether `rank` is on this rank's own node."""
        return rank // self.node_size == self.rank // self.node_size

    @property
    def num_local_peers(self) -> int:
        """Peers on this rank's own node."""
        first = self.rank // self.node_size * self.node_size
        return min(self.node_size, self.size - first) - 1

    @property
    def has_nodes(self) -> bool:
        """Several nodes of several ranks each, all alike."""
        return 1 < self.node_size < self.size and self.size % self.node_size == 0

    def global_rank(self, rank: int) -> int:
        return self.ranks[rank] if self.ranks else rank

    def close(self) -> None:
        """Give the group's connections back, if they are its own."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)


def world_mesh(device: torch.device) -> RankGroup:
    """All ranks of the default process group, as one node, or this process alone."""
    if not dist.is_initialized():
        return RankGroup(0, 1, 1, "none")
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = _backend_for(device)
    # gloo gets links of its own: an engine that fails cuts them to wake its peers, and must not cut the user's.
    group = dist.new_group(backend="gloo", timeout=_timeout()) if backend == "gloo" and size > 1 else None
    return RankGroup(rank, size, size, backend if size > 1 else "none", group, local_world_size=local_world_size(size))


def node_mesh(world: RankGroup) -> RankGroup:
    """The ranks of this rank's node: consecutive ranks, `world.node_size` at a time, and the last ones."""
    mine: RankGroup | None = None
    for start in range(0, world.size, world.node_size):
        ranks = tuple(range(start, min(start + world.node_size, world.size)))
        group = dist.new_group(list(ranks), backend=world.backend, timeout=_timeout()) if len(ranks) > 1 else None
        if world.rank in ranks:
            backend = world.backend if len(ranks) > 1 else "none"
            mine = RankGroup(world.rank - start, len(ranks), len(ranks), backend, group, ranks, world.local_world_size)
    assert mine is not None
    return mine


def across_mesh(world: RankGroup) -> RankGroup:
    """The ranks that stand like this one in their nodes."""
    mine: RankGroup | None = None
    for stand in range(world.node_size):
        ranks = tuple(range(stand, world.size, world.node_size))
        group = dist.new_group(list(ranks), backend=world.backend, timeout=_timeout())
        if world.rank in ranks:
            mine = RankGroup(world.rank // world.node_size, len(ranks), 1, world.backend, group, ranks)
    assert mine is not None
    return mine


def _timeout() -> timedelta | None:
    """The default group's; torch would give new ones a timeout of its own."""
    for kind in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # no backend for such tensors
            backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device(kind))
            if (options := getattr(backend, "options", None)) is not None:
                return cast(timedelta, options._timeout)
    return None


def timeout() -> float:
    """Seconds that a rank may keep others waiting, as whoever made the default group has said."""
    limit = _timeout()
    return _USUAL_TIMEOUT if limit is None else limit.total_seconds()


def local_world_size(world_size: int) -> int:
    """Ranks on this machine, as the launcher says."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return local if 0 < local <= world_size else world_size


def local_ranks_are_consecutive(rank: int, node_size: int) -> bool:
    """Whether ranks of a node follow each other, as far as the launcher says of this one."""
    return int(os.environ.get("LOCAL_RANK", rank % node_size)) == rank % node_size


def smallest_node(num_ranks: int, ranks_per_node: int) -> int:
    """The ranks of the last node, if they are fewer, else those of any."""
    return num_ranks % ranks_per_node or ranks_per_node if ranks_per_node < num_ranks else num_ranks


def size_of_world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def size_of_group(group: Any) -> int:
    """Ranks of a process group of the user's."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def start_process_group(device: torch.device, timeout: timedelta | None = None) -> bool:
    """Join the process group that the launcher announces; true if this call made it.

    Without a launcher (no RANK in the environment) the process stays alone.
    """
    if dist.is_initialized() or "RANK" not in os.environ:
        return False
    await_all_ranks(timeout)
    backend = "nccl" if device.type == "cuda" and _one_gpu_each() else "gloo"
    if device.type == "cuda" and backend == "nccl":
        dist.init_process_group(backend, timeout=timeout, device_id=device)
    else:
        dist.init_process_group(backend, timeout=timeout)
    return True


def _one_gpu_each() -> bool:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= num_gpus()


def _backend_for(device: torch.device) -> str:
    """The backend that the default group uses for `device`'s tensors ('cpu:gloo,cuda:nccl' names one for each)."""
    name = dist.get_backend()
    config = str(dist.get_backend_config()) if name == "undefined" or ":" in str(name) else str(name)
    for part in config.split(","):
        kind, _, backend = part.rpartition(":")
        if kind in ("", device.type):
            return backend
    return str(name)
