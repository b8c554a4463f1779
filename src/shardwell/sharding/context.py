"""The objects that all groups of one engine share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.utils.checkpoint import _StopRecomputationError

from shardwell.errors import NonFiniteError, PeerError, ShardwellError
from shardwell.memory import Device, MemoryStats, TemporaryBuffers
from shardwell.parallel import Axis, Collectives, MeshRoles
from shardwell.sharding.tiers import TierFactory


@dataclass(frozen=True)
class EngineContext:
    """The device, memory statistics, process groups and lower tiers that all groups of one engine share."""

    device: Device
    memory_stats: MemoryStats
    temporary: TemporaryBuffers
    comm: dict[Axis, Collectives]
    tiers: TierFactory | None = None  # stores state below the device, if anything is stored there
    roles: MeshRoles = field(init=False)  # the same collectives as in `comm`, by what they are for

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", MeshRoles.for_one_axis(self.world, self.comm.get(Axis.NODE)))

    @cached_property
    def world(self) -> Collectives:
        """Return the collectives over all ranks."""
        return self.comm[Axis.WORLD]

    @property
    def disk(self) -> Any:
        """Return the `DiskTier`, or None if nothing is stored on disk."""
        return None if self.tiers is None else self.tiers.disk

    @contextlib.contextmanager
    def failing_together(self, where: str, *, common: tuple[type[ShardwellError], ...] = ()) -> Iterator[None]:
        """Report an error of this rank to the other ranks before it is raised, so that they do not wait.

        All ranks raise the `common` errors themselves. The signal by which torch ends a recomputation is no error.
        """
        try:
            yield
        except _StopRecomputationError:
            raise
        except Exception as error:
            is_common = isinstance(error, (PeerError, NonFiniteError, *common))
            if self.world.agreement is not None and not is_common:
                self.world.agreement.fail(ShardwellError(f"{type(error).__name__} in {where}: {error}"))
            raise

    def close(self) -> None:
        """Close the files on disk and the connections."""
        if self.tiers is not None:
            self.tiers.close()
        for comm in self.comm.values():
            comm.close()
