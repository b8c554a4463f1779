"""The machine that a rank runs on: bytes of its device, its host and its drives, its cores, and its place among ranks.

Every such question goes to the current machine. `ThisMachine`, the default, asks the system, CUDA and the launcher. A
`SimulatedMachine` answers from figures: with it an engine runs on the meta device as one of many ranks that do not
exist, where tensors have sizes and no bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from shardwell.errors import ShardwellError
from shardwell.memory import limits
from shardwell.virtual_time.speeds import Speeds

_MOST_RANKS = 1 << 25  # a simulation has lists of them
NOT_LIMITED = float(1 << 60)  # bytes
_WORKSPACE, _LARGE_WORKSPACE = 8_519_680, 33_554_432  # bytes: torch's default for cuBLAS, and that for Hopper and B200


@dataclass(frozen=True)
class SimulatedBlocks:
    """The number of a model's identical blocks that are simulated, and the number that it has.

    What depends on a whole model, such as how its small parameters are shared, is decided as if all blocks were there.
    """

    simulated: int
    all: int

    def on_all(self, sizes: Iterable[tuple[str, int]]) -> int:
        """Return the size in the whole model of what parameters or units, by name, stand for: of a block, of all."""
        inside = outside = 0
        for name, size in sizes:
            if self.has(name):
                inside += size
            else:
                outside += size
        return inside * self.all // self.simulated + outside

    @staticmethod
    def has(name: str) -> bool:
        """Return whether a parameter or a unit is one of a block, or of a bundle of blocks ("0-4")."""
        return any(part.replace("-", "").isdigit() for part in name.split("."))


class Machine(Protocol):
    """The answers that an engine needs of a machine."""

    @property
    def blocks(self) -> SimulatedBlocks | None:
        """Return the blocks of a simulation that has few of them; None where a model is whole."""

    @property
    def ranks(self) -> SimulatedRanks | None:
        """Return the ranks of a simulation; None on a real machine."""

    def has_own_memory(self, device: torch.device) -> bool:
        """Return whether a device has memory of its own, to which data on the host has to be copied."""

    def capacity_bytes(self, device: torch.device) -> float:
        """Return the device bytes that this process may have; 0 where this is unknown."""

    def available_bytes(self, device: torch.device) -> float:
        """Return the device bytes that this process may have beyond those in use now; 0 where this is unknown."""

    def unreserved_bytes(self, device: torch.device) -> float:
        """Return the device bytes that this process may have but never reserved so far; 0 where this is unknown."""

    def workspace_bytes(self, device: torch.device) -> int:
        """Return the device bytes that matrix products take beside their tensors."""

    def free_host_bytes(self, local_world_size: int = 1) -> float:
        """Return the bytes of host memory that the ranks of this machine may still allocate together."""

    def free_disk_bytes(self, path: Path) -> int | None:
        """Return the bytes that may still be written at a path; None if the path does not answer."""

    def num_cores(self) -> int:
        """Return the number of cores that this process and its peers may keep busy."""

    def local_world_size(self, world_size: int) -> int:
        """Return the number of ranks on this machine."""

    def is_consecutive(self, rank: int, node_size: int) -> bool:
        """Return whether this rank has the place in its node that it has if the ranks of each node are consecutive."""


class ThisMachine:
    """The machine of this process, as the system, CUDA and the launcher describe it."""

    ranks = None
    blocks = None

    def has_own_memory(self, device: torch.device) -> bool:
        """Return whether a device is a GPU."""
        return device.type == "cuda"

    def capacity_bytes(self, device: torch.device) -> float:
        """Return the device bytes that this process may have; 0 where this is unknown."""
        if not self.has_own_memory(device):
            return 0.0
        total = torch.cuda.get_device_properties(device).total_memory
        return total * torch.cuda.get_per_process_memory_fraction(device)

    def available_bytes(self, device: torch.device) -> float:
        """Return the device bytes that this process may have beyond those in use now; 0 where this is unknown."""
        if not self.has_own_memory(device):
            return 0.0
        free, _ = torch.cuda.mem_get_info(device)
        num_ranks = -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // torch.cuda.device_count())  # that share the GPU
        mine = min(self.capacity_bytes(device), free / num_ranks + torch.cuda.memory_reserved(device))
        return max(0.0, mine - torch.cuda.memory_allocated(device))

    def unreserved_bytes(self, device: torch.device) -> float:
        """Return the device bytes that this process may have but never reserved so far; 0 where this is unknown."""
        if not self.has_own_memory(device):
            return 0.0
        free, _ = torch.cuda.mem_get_info(device)
        mine = min(self.capacity_bytes(device), free + torch.cuda.memory_reserved(device))
        return max(0.0, mine - torch.cuda.max_memory_reserved(device))

    def workspace_bytes(self, device: torch.device) -> int:
        """Return the device bytes that matrix products take beside their tensors.

        Torch gives cuBLAS a workspace for each thread that multiplies: the one of the forward and that of the backward.
        """
        if not self.has_own_memory(device):
            return 0
        is_large = torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))
        return 2 * (_LARGE_WORKSPACE if is_large else _WORKSPACE)

    def free_host_bytes(self, local_world_size: int = 1) -> float:
        """Return the bytes of host memory that the ranks of this machine may still allocate together."""
        return limits.free_host_bytes(local_world_size)

    def free_disk_bytes(self, path: Path) -> int | None:
        """Return the bytes that this user may still write; None if the path does not answer."""
        return limits.free_disk_bytes(path)

    def num_cores(self) -> int:
        """Return the number of cores that this process and its peers may keep busy."""
        return limits.num_cores()

    def local_world_size(self, world_size: int) -> int:
        """Return the number of ranks on this machine, according to the launcher."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return local if 0 < local <= world_size else world_size

    def is_consecutive(self, rank: int, node_size: int) -> bool:
        """Return whether this rank's LOCAL_RANK is the one it has if the ranks of each node are consecutive."""
        return int(os.environ.get("LOCAL_RANK", rank % node_size)) == rank % node_size


@dataclass(frozen=True)
class SimulatedRanks:
    """The place of a simulated rank among the others."""

    rank: int = 0
    size: int = 1
    per_node: int = 0  # 0: all ranks are in one node
    backend: str = "nccl"  # or "gloo": the route that collectives take

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ShardwellError(f"a simulated rank {self.rank} of {self.size}: expected a rank from 0 to the number")
        if self.size > _MOST_RANKS:
            raise ShardwellError(f"{self.size:,} simulated ranks: expected at most {_MOST_RANKS:,}")
        if self.per_node < 0:
            raise ShardwellError(f"{self.per_node} ranks in a node: expected 1 or more")


@dataclass(frozen=True)
class SimulatedMachine:
    """One node of a cluster that need not exist; the bytes of the host and of the drives are those of the node."""

    device_bytes: float = NOT_LIMITED  # of each rank's device
    host_bytes: float = NOT_LIMITED
    disk_bytes: float = NOT_LIMITED
    has_gpus: bool = True  # the devices have memory of their own
    ranks: SimulatedRanks = field(default_factory=SimulatedRanks)
    cores: int = 64
    speeds: Speeds | None = None  # with them, plans have times
    blocks: SimulatedBlocks | None = None  # where the model has few of its blocks

    def has_own_memory(self, device: torch.device) -> bool:
        """Return whether the simulated devices are GPUs."""
        return self.has_gpus

    def capacity_bytes(self, device: torch.device) -> float:
        """Return the bytes of a device."""
        return self.device_bytes if self.has_gpus else 0.0

    def available_bytes(self, device: torch.device) -> float:
        """Return the bytes of a device: nothing is in use before the engine is built."""
        return self.capacity_bytes(device)

    def workspace_bytes(self, device: torch.device) -> int:
        """Return 0: plans leave a margin for what libraries take."""
        return 0

    def unreserved_bytes(self, device: torch.device) -> float:
        """Return 0: what a run would leave unreserved is not known, so that nothing is moved to the device later."""
        return 0.0

    def free_host_bytes(self, local_world_size: int = 1) -> float:
        """Return the bytes of the node's host memory."""
        return self.host_bytes

    def free_disk_bytes(self, path: Path) -> int | None:
        """Return the bytes of the node's drives, at any path."""
        return int(self.disk_bytes)

    def num_cores(self) -> int:
        """Return the cores of the node."""
        return self.cores

    def local_world_size(self, world_size: int) -> int:
        """Return the number of ranks in a node."""
        return min(self.ranks.per_node or world_size, world_size)

    def is_consecutive(self, rank: int, node_size: int) -> bool:
        """Return true: ranks of a simulated node are consecutive."""
        return True


_current: Machine = ThisMachine()


def current_machine() -> Machine:
    """Return the machine that new engines run on."""
    return _current


@contextlib.contextmanager
def simulated(machine: Machine) -> Iterator[None]:
    """Let engines that are built inside run on another machine. Their models must be on the meta device."""
    global _current
    before, _current = _current, machine
    try:
        yield
    finally:
        _current = before
