"""The objects that all groups of one engine share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import _StopRecomputationError

from shardwell.errors import NonFiniteError, PeerError, ShardwellError
from shardwell.memory import Device, MemoryStats, TemporaryBuffers
from shardwell.parallel import MeshRoles
from shardwell.sharding.tiers import TierFactory


@dataclass(frozen=True)
class EngineContext:
    """The device, memory statistics, process groups and lower tiers that all groups of one engine share."""

    device: Device
    memory_stats: MemoryStats
    temporary: TemporaryBuffers
    roles: MeshRoles  # the groups of ranks, by what they are for
    tiers: TierFactory | None = None  # stores state below the device, if anything is stored there

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
            if not is_common:
                self.roles.agreement.fail(ShardwellError(f"{type(error).__name__} in {where}: {error}"), where)
            raise

    def close(self) -> None:
        """Close the files on disk and the connections."""
        if self.tiers is not None:
            self.tiers.close()
        self.roles.close()
