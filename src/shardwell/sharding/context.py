"""What the groups of one engine share: the device, the books, the ranks, the drives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch.utils.checkpoint import _StopRecomputationError

from shardwell.errors import NonFiniteError, PeerError, ShardwellError
from shardwell.memory import Device, MemoryStats, TemporaryBuffers
from shardwell.offload.disk import DiskTier
from shardwell.offload.param_swap import ReadBuffers
from shardwell.parallel import Axis, Collectives


@dataclass(frozen=True)
class EngineContext:
    """What the groups of one engine share."""

    device: Device
    account: MemoryStats
    scratch: TemporaryBuffers
    comm: dict[Axis, Collectives]
    disk: DiskTier | None = None
    pages: ReadBuffers | None = None  # for parameters on disk

    @property
    def world(self) -> Collectives:
        return self.comm[Axis.WORLD]

    @contextlib.contextmanager
    def failing_together(self, where: str, *, common: tuple[type[ShardwellError], ...] = ()) -> Iterator[None]:
        """An error on this rank would leave the others waiting: tell them before it goes up.

        Of `common` errors they know: all ranks raise those. The signal by which torch ends a recomputation is none.
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
        """Give drives and connections back."""
        if self.disk is not None:
            self.disk.close()
        for comm in self.comm.values():
            comm.close()
