"""Recycled buffers for what comes and goes: gradients in the making, and what a backend needs to receive into."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwell.memory.account import Account, State, Tier
from shardwell.memory.device import Device


class Pool:
    """Hands out 1-D tensors cut from a few blocks and takes them back.

    A block that is too small for a request is replaced by a larger one, so the pool settles at as many blocks as are
    ever out at once, each as large as the largest request. Parameters never live here: autograd may hold views of them.
    """

    def __init__(self, device: Device, account: Account) -> None:
        self._device = device
        self._account = account
        self._free: list[Tensor] = []  # uint8, by ascending size
        self._out: dict[int, tuple[Tensor, State, str, bool]] = {}

    def take(self, numel: int, dtype: torch.dtype, state: State, unit: str, *, recycle: bool = True) -> Tensor:
        """An unfilled tensor. With `recycle` off it is made for this request alone and freed when given back."""
        size = max(numel * dtype.itemsize, 1)
        block = self._recycled(size) if recycle else self._device.empty(size, torch.uint8)
        given = block[: numel * dtype.itemsize].view(dtype)
        self._out[id(given)] = block, state, unit, recycle
        self._account.add(state, unit, Tier.DEVICE, block.numel())
        return given

    def give(self, tensor: Tensor) -> None:
        """Take back a tensor that `take` handed out; its contents are void from now on."""
        block, state, unit, recycle = self._out.pop(id(tensor))
        self._account.remove(state, unit, Tier.DEVICE, block.numel())
        if recycle:
            self._free.append(block)
            self._free.sort(key=Tensor.numel)
            self._count_idle()

    def _recycled(self, size: int) -> Tensor:
        at = next((i for i, block in enumerate(self._free) if block.numel() >= size), None)
        if at is None and self._free:
            self._free.pop()  # before the larger one is made, so that both never exist at once
        block = self._device.empty(size, torch.uint8) if at is None else self._free.pop(at)
        self._count_idle()
        return block

    def trim(self) -> None:
        self._free.clear()
        self._count_idle()

    def _count_idle(self) -> None:
        self._account.idle = sum(block.numel() for block in self._free)
