"""Pinned host memory for what travels between device and host."""

from __future__ import annotations

import queue

from torch import Tensor

from shardwell.memory.account import Account, State, Tier
from shardwell.memory.device import Device, Mark


class Pinned:
    """Makes pinned memory, by the books."""

    def __init__(self, device: Device, account: Account) -> None:
        self._device, self._account = device, account

    def make(self, num_bytes: int, unit: str = "") -> Tensor:
        """1D, bytes."""
        self._account.add(State.STAGING, unit, Tier.HOST, num_bytes)
        return self._device.pinned(num_bytes)

    def drop(self, memory: Tensor, unit: str = "") -> None:
        """Strike memory out; it is freed when nobody holds it."""
        self._account.remove(State.STAGING, unit, Tier.HOST, memory.numel())


class Slots:
    """A bounded pool of pieces, made when first needed. Who finds none free waits until one comes back.

    One thread takes, any thread gives.
    """

    def __init__(self, pinned: Pinned, num: int, num_bytes: int) -> None:
        self._pinned, self._unmade, self._num_bytes = pinned, num, num_bytes
        self._free: queue.SimpleQueue[tuple[Tensor, Mark]] = queue.SimpleQueue()

    def take(self, num_bytes: int) -> Tensor:
        """1D, that many bytes or more."""
        self._num_bytes = max(self._num_bytes, num_bytes)
        if self._unmade and self._free.empty():
            self._unmade -= 1
            return self._pinned.make(self._num_bytes)
        memory, mark = self._free.get()
        mark.synchronize()
        if memory.numel() < num_bytes:
            self._pinned.drop(memory)
            memory = self._pinned.make(self._num_bytes)
        return memory

    def give(self, memory: Tensor, after: Mark) -> None:
        """Take a piece back, which is free once the mark has passed."""
        self._free.put((memory, after))
