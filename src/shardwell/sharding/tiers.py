"""What a group needs of state that is stored below the device: protocols, which `offload/storage.py` implements."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from shardwell.memory import Tier
from shardwell.sharding.storage import FormStorage, MasterStorage


class OffloadedStorage(MasterStorage, Protocol):
    """A storage below the device, whose parameters can be brought nearer ahead of their all-gather."""

    can_prefetch_to_device: bool
    wrapped: FormStorage  # the form, which knows no tier

    @property
    def is_on_device(self) -> bool:
        """Whether a prefetched copy of the parameters is on the device, or in flight to it."""

    def prefetch_from_disk(self) -> bool:
        """Start to read parameters on disk, because their all-gather is near; false if there is nothing to read."""

    def prefetch_to_device(self) -> bool:
        """Start to copy the parameters to the device, for the all-gather after the next one; false if it cannot."""

    def cancel_prefetch(self) -> None:
        """Drop prefetched copies: no all-gather is near after all, or the stored values will change."""

    def swapped_in(self, *, changes: bool = False) -> AbstractContextManager[None]:
        """Return a context in which everything on disk is in memory; it may be nested."""


class TierFactory(Protocol):
    """A factory of storage below the device; `offload/storage.py` has the only one."""

    disk: Any  # the `DiskTier`, if anything is stored on disk
    read_buffers: Any  # the `ReadBuffers`, if parameters are stored on disk

    def wrap(self, form: FormStorage, name: str, unit: str, masters: Tier) -> OffloadedStorage:
        """Return the storage of a form whose parameters or `masters` are stored below the device."""

    def swap_out(self, tensor: Tensor, unit: str) -> SwappedOut:
        """Store a tensor (1D) on disk."""

    def close(self) -> None:
        """Close the files on disk."""


class SwappedOut(Protocol):
    """Tensors on disk."""

    def swapped_in(self, *, changes: bool) -> AbstractContextManager[None]:
        """Return a context in which the tensors are in memory; with `changes` they are written at its end."""

    def free(self) -> None:
        """Forget the tensors."""
