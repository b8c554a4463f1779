"""The objects that all groups of one engine share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwell.memory import Device, MemoryStats, TemporaryBuffers
from shardwell.parallel import Collectives, MeshRoles
from shardwell.sharding.tiers import TierFactory


@dataclass(frozen=True)
class TiedCopies:
    """Parameters that several pipeline stages hold, and the ranks that hold copies of this rank's shards."""

    names: Mapping[int, str]  # by the id of the parameter
    comm: Collectives


@dataclass(frozen=True)
class EngineContext:
    """The device, memory statistics, process groups and lower tiers that all groups of one engine share."""

    device: Device
    memory_stats: MemoryStats
    temporary: TemporaryBuffers
    roles: MeshRoles  # the groups of ranks, by what they are for
    tiers: TierFactory | None = None  # stores state below the device, if anything is stored there
    tied: TiedCopies | None = None  # what other pipeline stages hold, too

    def tied_name(self, parameter: object) -> str:
        """Return the name of a parameter that other pipeline stages hold, too; otherwise an empty string."""
        return "" if self.tied is None else self.tied.names.get(id(parameter), "")

    @property
    def disk(self) -> Any:
        """Return the `DiskTier`, or None if nothing is stored on disk."""
        return None if self.tiers is None else self.tiers.disk

    def of_group(self, *, is_cut: bool) -> EngineContext:
        """Return the context of a group: that of parameters which tensor ranks hold alike has a wider data axis."""
        return self if is_cut or self.roles.alike is None else replace(self, roles=self.roles.alike)

    def close(self) -> None:
        """Close the files on disk and the connections."""
        if self.tiers is not None:
            self.tiers.close()
        self.roles.close()
