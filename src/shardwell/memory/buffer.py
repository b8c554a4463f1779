"""A flat 1-D tensor whose memory can be freed and allocated again while every view of it stays alive."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwell.memory.device import Device
from shardwell.memory.statistics import MemoryStats, StateKind, Tier


class FlatBuffer:
    """A 1-D tensor whose storage is counted in the memory statistics, and can be freed under its views.

    `free` frees the bytes under all views, `allocate` allocates them again, uninitialised. Freeing resizes the storage
    because autograd saves views of parameters: replacing the tensor would keep every unsharded unit alive until its
    backward has run.
    """

    tensor: Tensor  # 1D
    nbytes: int

    def __init__(
        self,
        device: Device,
        account: MemoryStats,
        entry: tuple[StateKind, str, Tier],
        numel: int,
        dtype: torch.dtype,
        *,
        pinned: bool = False,
    ) -> None:
        self._books = account, entry
        if pinned:
            self.tensor = device.pinned(numel * dtype.itemsize).view(dtype)
        else:
            self.tensor = device.empty(numel, dtype, entry[2], pinned=False)
        self.nbytes = self.tensor.untyped_storage().nbytes()
        self.present = True
        self.is_seen = False  # `present` is False, but other tensors look at the bytes, so they stay allocated
        account.add(*entry, self.nbytes)

    def free(self) -> None:
        """Free the bytes under all views."""
        if self.present or self.is_seen:
            self.tensor.untyped_storage().resize_(0)
            self.present = self.is_seen = False
            account, entry = self._books
            account.remove(*entry, self.nbytes)

    def free_unseen(self, num_own: int) -> None:
        """Free the bytes, unless more than `num_own` tensors share them: reading freed bytes crashes.

        It may be called again for a buffer that was still seen.
        """
        if self.num_aliases > num_own:
            self.is_seen = self.is_seen or self.present
            self.present = False
        else:
            self.free()

    @property
    def num_aliases(self) -> int:
        """Return how many tensors share the storage, this one included."""
        return int(torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata))

    def abandon_storage(self) -> None:
        """Leave the storage to the tensors that still look at it, and continue with a new, uninitialised one."""
        self.tensor = torch.empty_like(self.tensor)

    def abandon(self) -> None:
        """Leave the storage to the tensors that still look at it, for good: it is removed from the statistics."""
        if self.present:
            self.present = False
            account, entry = self._books
            account.remove(*entry, self.nbytes)
        self.tensor = self.tensor.new_empty(0)

    def allocate(self) -> None:
        """Allocate the bytes again, uninitialised."""
        if not self.present and not self.is_seen:
            self.tensor.untyped_storage().resize_(self.nbytes)
            account, entry = self._books
            account.add(*entry, self.nbytes)
        self.present, self.is_seen = True, False
