"""Temporary buffers: gradients that are being accumulated, and staging buffers of collectives.

The allocators below reuse memory well when sizes repeat, and units repeat (glibc's once it keeps its pages, CUDA's
always): a pool on top of them was measured to save nothing and to hold its blocks between steps. What remains to do
here is counting. Parameters are never allocated here: autograd may hold views of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwell.memory.device import Device
from shardwell.memory.statistics import MemoryStats, StateKind, Tier


class TemporaryBuffers:
    """An allocator of temporary 1-D tensors that counts them in the memory statistics."""

    def __init__(self, device: Device, account: MemoryStats) -> None:
        self._device = device
        self._account = account
        self._out: dict[int, tuple[Tensor, StateKind, str]] = {}

    def allocate(self, numel: int, dtype: torch.dtype, state: StateKind, unit: str) -> Tensor:
        """Return an uninitialised tensor."""
        return self.adopt(self._device.empty(numel, dtype), state, unit)

    def adopt(self, tensor: Tensor, state: StateKind, unit: str) -> Tensor:
        """Count a tensor that was allocated elsewhere, as if it had been allocated here."""
        self._out[id(tensor)] = tensor, state, unit
        self._account.add(state, unit, Tier.DEVICE, tensor.numel() * tensor.element_size())
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Free a tensor. Its last use must be ordered before the caller's stream."""
        _, state, unit = self._out.pop(id(tensor))
        self._account.remove(state, unit, Tier.DEVICE, tensor.numel() * tensor.element_size())
