"""Groups of ranks: all ranks, those of a node, those at the same position of all nodes, those of a row of a mesh."""

from __future__ import annotations

import contextlib
import enum
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from shardwell.errors import ShardwellError
from shardwell.memory.local_gpus import num_gpus
from shardwell.memory.machine import current_machine
from shardwell.parallel.attendance import await_all_ranks
from shardwell.parallel.nccl import keeping_the_process

_USUAL_TIMEOUT = 1800.0  # seconds: torch's default


class Axis(enum.Enum):
    """The set of ranks that a tensor is sharded over."""

    SHARD = "shard"  # over all ranks that ZeRO splits states over
    NODE = "node"  # over the ranks of one node; every node holds a copy

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere


@dataclass(frozen=True)
class RankGroup:
    """One process group as this rank sees it: its position in the group, the group's nodes and backend."""

    rank: int
    size: int
    node_size: int  # ranks per node; the last node may have fewer
    backend: str  # "gloo", "nccl", "fake"; "none" for one process
    group: Any = None  # a torch process group; None means the default one
    ranks: tuple[int, ...] = ()  # global ranks, for broadcast and point-to-point; empty: 0..size-1
    local_world_size: int = 1  # ranks that share this machine's memory and disks, according to the launcher
    reduce_group: Any = None  # a second communicator of the same ranks, for reductions; None: `group` serves them, too
    is_simulated: bool = False  # the other ranks do not exist, and no bytes are moved

    def is_same_node(self, rank: int) -> bool:
        """Return whether `rank` is on this rank's own node."""
        return rank // self.node_size == self.rank // self.node_size

    @property
    def has_two_communicators(self) -> bool:
        """Return whether reductions have a communicator of their own, in a simulation, too."""
        return self.backend == "nccl" and self.size > 1

    @property
    def num_local_peers(self) -> int:
        """Return the number of other ranks on this rank's own node."""
        first = self.rank // self.node_size * self.node_size
        return min(self.node_size, self.size - first) - 1

    @property
    def has_nodes(self) -> bool:
        """Return whether there are several nodes of several ranks each, all of the same size."""
        return 1 < self.node_size < self.size and self.size % self.node_size == 0

    def global_rank(self, rank: int) -> int:
        """Return the rank in the default process group of a rank of this group."""
        return self.ranks[rank] if self.ranks else rank

    def close(self) -> None:
        """Destroy the process groups, except for the default one."""
        close_groups((self.reduce_group, self.group))


def close_groups(groups: Iterable[Any]) -> None:
    """Destroy process groups."""
    for group in groups:
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def world_mesh(device: torch.device) -> RankGroup:
    """Return the group of all ranks of the default process group, as one node, or of this process alone."""
    if (ranks := current_machine().ranks) is not None:
        backend, local = ranks.backend if ranks.size > 1 else "none", local_world_size(ranks.size)
        return RankGroup(ranks.rank, ranks.size, ranks.size, backend, local_world_size=local, is_simulated=True)
    if not dist.is_initialized():
        return RankGroup(0, 1, 1, "none")
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = _backend_for(device) if size > 1 else "none"
    # The engine gets its own process group: when it fails, it cuts its links to wake its peers, and must not cut the
    # links of the default process group, from which it makes new ones if all ranks go on after an error.
    group = _new_group(range(size), backend, "shardwell") if backend in ("gloo", "nccl") else None
    reducing = _reduce_group(range(size), backend)
    return RankGroup(rank, size, size, backend, group, local_world_size=local_world_size(size), reduce_group=reducing)


def _reduce_group(ranks: Sequence[int], backend: str) -> Any:
    """Return a second communicator of these ranks for reductions, or None where one serves all-gathers as well.

    NCCL runs the collectives of one communicator one after another, so an all-gather would wait for a reduce-scatter
    and leave one direction of the link idle. Two cannot lock each other up: every rank enqueues the collectives of both
    in the same order, and the kernels of both fit on a device beside each other.
    """
    if backend != "nccl" or len(ranks) == 1 or current_machine().ranks is not None:
        return None
    return _new_group(ranks, backend, "shardwell's reductions")


def _new_group(ranks: Sequence[int], backend: str, words: str | None = None) -> Any:
    """Return a process group of these ranks, in which errors do not end the process.

    It is None for one rank, and in a simulation.
    """
    if len(ranks) == 1 or current_machine().ranks is not None:
        return None
    with keeping_the_process():
        return dist.new_group(list(ranks), backend=backend, timeout=_timeout(), group_desc=words)


def node_mesh(world: RankGroup) -> RankGroup:
    """Return the group of this rank's node: `world.node_size` consecutive ranks, or fewer on the last node."""
    mine: RankGroup | None = None
    first = world.rank // world.node_size * world.node_size
    for start in [first] if world.is_simulated else range(0, world.size, world.node_size):
        ranks = tuple(range(start, min(start + world.node_size, world.size)))
        group = _new_group(ranks, world.backend)
        reducing = _reduce_group(ranks, world.backend)
        if world.rank in ranks:
            backend, place = world.backend if len(ranks) > 1 else "none", (world.rank - start, len(ranks), len(ranks))
            mine = RankGroup(*place, backend, group, ranks, world.local_world_size, reducing, world.is_simulated)
    assert mine is not None
    return mine


def across_mesh(world: RankGroup) -> RankGroup:
    """Return the group of the ranks that have the same position as this rank in their nodes."""
    mine: RankGroup | None = None
    for stand in [world.rank % world.node_size] if world.is_simulated else range(world.node_size):
        ranks = tuple(range(stand, world.size, world.node_size))
        group = _new_group(ranks, world.backend)
        reducing, place = _reduce_group(ranks, world.backend), (world.rank // world.node_size, len(ranks), 1)
        if world.rank in ranks:
            mine = RankGroup(
                *place, world.backend, group, ranks, reduce_group=reducing, is_simulated=world.is_simulated
            )
    assert mine is not None
    return mine


def mesh_of(world: RankGroup, parts: Sequence[Sequence[int]]) -> RankGroup:
    """Return the group of this rank among `parts`, which hold every rank once. All ranks must call it.

    In a simulation this rank's part suffices.
    """
    mine: RankGroup | None = None
    for part in parts:
        ranks = sorted(part)  # as torch does: a library's collectives follow the order of the process group
        is_alone = len(ranks) == 1
        group = _new_group(ranks, world.backend)
        reducing = _reduce_group(ranks, world.backend)
        if world.rank in ranks:
            place = ranks.index(world.rank), len(ranks), _node_size(ranks, world.node_size)
            backend = "none" if is_alone else world.backend
            mine = RankGroup(*place, backend, group, tuple(ranks), world.local_world_size, reducing, world.is_simulated)
    assert mine is not None
    return mine


def pair_group(rank: int, pairs: Sequence[Sequence[int]], backend: str) -> Any:
    """Return the process group of the pair that has this rank; None if no pair has. All ranks must call it."""
    mine = None
    for pair in pairs:
        group = _new_group(sorted(pair), backend)
        mine = group if rank in pair else mine
    return mine


def _node_size(ranks: Sequence[int], ranks_per_node: int) -> int:
    """Return how many of these ranks a node has; 1 if the nodes have different numbers of them."""
    counts = list(Counter(rank // ranks_per_node for rank in ranks).values())
    is_even = all(count == counts[0] for count in counts[:-1]) and counts[-1] <= counts[0]
    return counts[0] if is_even else 1


def _timeout() -> timedelta | None:
    """Return the timeout of the default process group; torch would give new groups its own default."""
    for kind in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # there is no backend for such tensors
            backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device(kind))
            if (options := getattr(backend, "options", None)) is not None:
                return cast(timedelta, options._timeout)
    return None


def timeout() -> float:
    """Return the seconds that a rank may keep others waiting: the timeout of the default process group."""
    limit = _timeout()
    return _USUAL_TIMEOUT if limit is None else limit.total_seconds()


def local_world_size(world_size: int) -> int:
    """Return the number of ranks on this machine, according to the launcher."""
    return current_machine().local_world_size(world_size)


def local_ranks_are_consecutive(rank: int, node_size: int) -> bool:
    """Return whether this rank's LOCAL_RANK is the one it has if the ranks of each node are consecutive."""
    return current_machine().is_consecutive(rank, node_size)


def smallest_node(num_ranks: int, ranks_per_node: int) -> int:
    """Return the number of ranks of the last node if it has fewer than the others, else of any node."""
    return num_ranks % ranks_per_node or ranks_per_node if ranks_per_node < num_ranks else num_ranks


def size_of_world() -> int:
    """Return the world size of the default process group; 1 without one."""
    if (ranks := current_machine().ranks) is not None:
        return ranks.size
    return dist.get_world_size() if dist.is_initialized() else 1


def rank_in_world() -> int:
    """Return this rank in the default process group; 0 without one."""
    if (ranks := current_machine().ranks) is not None:
        return ranks.rank
    return dist.get_rank() if dist.is_initialized() else 0


def size_of_group(group: Any) -> int:
    """Return the number of ranks of a process group of the user's."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def start_process_group(device: torch.device, timeout: timedelta | None = None) -> bool:
    """Initialise the default process group from the launcher's environment; return whether this call did so.

    Without a launcher (no RANK in the environment) the process remains single.
    """
    if dist.is_initialized() or current_machine().ranks is not None:
        return False
    _check_environment()
    if "RANK" not in os.environ:
        return False
    await_all_ranks(timeout)
    backend = "nccl" if device.type == "cuda" and _one_gpu_each() else "gloo"
    with keeping_the_process():
        if device.type == "cuda" and backend == "nccl":
            dist.init_process_group(backend, timeout=timeout, device_id=device)
        else:
            dist.init_process_group(backend, timeout=timeout)
    return True


def _check_environment() -> None:
    """Raise if the launcher's variables are no numbers, miss each other or contradict each other."""
    found: dict[str, int] = {}
    # Without a rank a port is of no launcher: Kubernetes sets MASTER_PORT=tcp://... for a service of that name.
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT") if "RANK" in os.environ else ("WORLD_SIZE",):
        if name in os.environ:
            try:
                found[name] = int(os.environ[name])
            except ValueError:
                raise ShardwellError(f"the environment has {name}={os.environ[name]!r}: expected a number") from None
    rank, size = found.get("RANK"), found.get("WORLD_SIZE", 1)
    if rank is None and size > 1:
        raise ShardwellError(
            f"the environment has WORLD_SIZE={size} and no RANK: each process would train alone. Start ranks by "
            "`shardwell run` or torchrun, or set RANK in each; unset WORLD_SIZE for a single process"
        )
    if rank is None:
        return
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ShardwellError(
            f"the environment has RANK={rank} and no {' and '.join(missing)}: start ranks by `shardwell run` or "
            "torchrun, or set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; unset RANK for a single process"
        )
    if not 0 <= rank < size or not 0 <= found["MASTER_PORT"] < 1 << 16:
        raise ShardwellError(
            f"the environment has RANK={rank}, WORLD_SIZE={size} and MASTER_PORT={found['MASTER_PORT']}: ranks count "
            "from 0 to one below WORLD_SIZE, and ports end at 65535"
        )


def _one_gpu_each() -> bool:
    """Return whether each rank of this machine can have a GPU of its own, which NCCL needs."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= num_gpus()


def _backend_for(device: torch.device) -> str:
    """Return the default group's backend for tensors of `device` ('cpu:gloo,cuda:nccl' names one for each)."""
    name = dist.get_backend()
    config = str(dist.get_backend_config()) if name == "undefined" or ":" in str(name) else str(name)
    for part in config.split(","):
        kind, _, backend = part.rpartition(":")
        if kind in ("", device.type):
            return backend
    return str(name)
