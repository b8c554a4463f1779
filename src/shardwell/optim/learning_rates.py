"""The check whether all ranks step with the same learning rates: one number in the all-reduce of the norm.

Each rank adds a checksum of its rates to the sum over the ranks. If all checksums are equal, the sum is the checksum
times the number of ranks; if not, every rank finds a difference. The sum on a GPU is read at the next step, so that no
rank waits for it.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell.errors import DivergenceError
from shardwell.memory.device import AsyncScalar
from shardwell.parallel.consistency import check_alike
from shardwell.sharding import EngineContext

# the hyperparameters that schedulers and users change between steps
_NAMES = ("lr", "weight_decay", "momentum", "betas")


class LearningRateCheck:
    """The check of the hyperparameters in the parameter groups of one optimizer."""

    def __init__(self, context: EngineContext, optimizer: Optimizer) -> None:
        self._context, self._optimizer = context, optimizer
        agreement = context.world.agreement
        self._is_on = agreement is not None and agreement.store is not None  # there are other ranks, and they are real
        self._number = -1.0
        self._told: Tensor | None = None  # the checksum, on the device
        self._later: tuple[AsyncScalar, float] | None = None

    def says(self) -> list[Tensor]:
        """Return the checksum (1D) to be summed over the ranks, if there are several."""
        if not self._is_on:
            return []
        number = float(zlib.crc32(self._packed()))
        if self._told is None or number != self._number:
            self._number = number
            self._told = self._context.device.scalar(number, torch.float64).view(1)
        return [self._told]

    def ask(self, total: Tensor, place: int) -> None:
        """Take the sum over the ranks; where the host need not wait for it, it is compared now."""
        if not self._is_on:
            return
        if self._context.device.is_cuda:
            self._later = self._context.device.read_async(total[place]), self._number
        else:
            self._compare(total[place].item(), self._number)

    def hear(self) -> None:
        """Raise an error, on all ranks, if the rates differed at the last step."""
        if self._later is not None:
            (later, number), self._later = self._later, None
            self._compare(float(later.get()), number)

    def _compare(self, total: float, number: float) -> None:
        if total != number * self._context.world.mesh.size:
            check_alike(self._context.world, "step", {"optimizer's": self._words()})
            raise DivergenceError(
                "ranks took the last step with different learning rates. Set the same on all of them."
            )

    def _packed(self) -> bytes:
        numbers: list[float] = []
        for group in self._optimizer.param_groups:
            for name in _NAMES:
                value = group.get(name)
                if type(value) is float:
                    numbers.append(value)
                elif value is not None:
                    numbers += _numbers(value)
        return struct.pack(f"{len(numbers)}d", *numbers)

    def _words(self) -> dict[str, str]:
        several = len(self._optimizer.param_groups) > 1
        return {
            f"{name}{f' of parameter group {number}' if several else ''}": repr(_numbers(group[name]))[1:-1]
            for number, group in enumerate(self._optimizer.param_groups)
            for name in _NAMES
            if name in group
        }


def _numbers(value: Any) -> list[float]:
    """Return the numbers that are known without waiting for a GPU."""
    if type(value) is tuple and len(value) == 2 and type(value[0]) is type(value[1]) is float:
        return [*value]
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    if isinstance(value, Tensor):
        return [float(value)] if value.numel() == 1 and value.device.type == "cpu" else []
    return [float(value)] if isinstance(value, int | float) else []
