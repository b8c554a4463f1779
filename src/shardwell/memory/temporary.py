"""Memory for what comes and goes: gradients in the making, and what a backend needs to receive into.

The allocators below recycle well when sizes repeat, and units repeat (glibc's once it keeps its pages, CUDA's always):
a pool on top of them was measured to save nothing and to hold its blocks between steps. What is left to do here is to
keep the books. Parameters never live here: autograd may hold views of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwell.memory.device import Device
from shardwell.memory.statistics import MemoryStats, StateKind, Tier


class TemporaryBuffers:
    """Hands out 1-D tensors and takes them back, by the books."""

    def __init__(self, device: Device, account: MemoryStats) -> None:
        self._device = device
        self._account = account
        self._out: dict[int, tuple[Tensor, StateKind, str]] = {}

    def allocate(self, numel: int, dtype: torch.dtype, state: StateKind, unit: str) -> Tensor:
        """An unfilled tensor."""
        return self.adopt(self._device.empty(numel, dtype), state, unit)

    def adopt(self, tensor: Tensor, state: StateKind, unit: str) -> Tensor:
        """Enter a tensor that somebody else made, as if it had been taken here."""
        self._out[id(tensor)] = tensor, state, unit
        self._account.add(state, unit, Tier.DEVICE, tensor.numel() * tensor.element_size())
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Take a tensor back. Its last user must be ordered before the caller's lane."""
        _, state, unit = self._out.pop(id(tensor))
        self._account.remove(state, unit, Tier.DEVICE, tensor.numel() * tensor.element_size())
