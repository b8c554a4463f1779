"""What the groups of one engine share: the device, the books, the ranks, the drives."""

from __future__ import annotations

from dataclasses import dataclass

from shardwell.comm import Axis, Collectives
from shardwell.memory import Account, Device, Scratch
from shardwell.memory.disk import DiskTier
from shardwell.memory.pages import Pages


@dataclass(frozen=True)
class Context:
    """What the groups of one engine share."""

    device: Device
    account: Account
    scratch: Scratch
    comm: dict[Axis, Collectives]
    disk: DiskTier | None = None
    pages: Pages | None = None  # for parameters on disk

    @property
    def world(self) -> Collectives:
        return self.comm[Axis.WORLD]

    def close(self) -> None:
        """Give drives and connections back."""
        if self.disk is not None:
            self.disk.close()
        for comm in self.comm.values():
            comm.close()
