"""Moving a batch to the device, and to the compute dtype under mixed precision.

A model may change the containers that it is called with: append to a list, set a key. Where nothing had to be moved,
the model gets the caller's own containers. Where it gets copies, what it did to them is done to the caller's containers
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from shardwell.runtime.pytree import map_tensors


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return `value` with its tensors on `device`, floating-point ones in `dtype` if given.

    Unknown containers stay as they are.
    """
    return map_tensors(value, mover(device, dtype))


def mover(device: torch.device, dtype: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function that moves a tensor to `device` and, if it is floating-point, to `dtype`."""

    def move(tensor: Tensor) -> Tensor:
        floating = dtype is not None and tensor.is_floating_point()
        return tensor.to(device, dtype if floating else None, non_blocking=True)

    return move


class Inputs:
    """The arguments of a forward, moved to the device."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]) -> None:
        self._pairs: list[tuple[Any, Any]] = []
        self.args, self.kwargs = map_tensors((args, kwargs), change, self._pairs)
        self._before = [_contents(copy) for _, copy in self._pairs]

    def give_back(self) -> None:
        """Apply what the forward did to the copies to the caller's containers, with the caller's own tensors."""
        if not self._pairs:
            return
        own = {id(copy): original for original, copy in self._pairs}
        for (original, copy), before in zip(self._pairs, self._before, strict=True):
            if before is None:
                continue
            now = _contents(copy)
            if isinstance(before, list):
                if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                    original[:] = [own.get(id(item), item) for item in now]
                continue
            target = original if isinstance(original, MutableMapping) else vars(original)
            for key in [key for key in before if key not in now]:
                del target[key]
            for key, item in now.items():
                if key not in before or item is not before[key]:
                    target[key] = own.get(id(item), item)


def _contents(copy: Any) -> Any:
    """Return what can change in a container; None for tensors, and for objects without attributes of their own."""
    if isinstance(copy, Tensor):
        return None
    if isinstance(copy, list):
        return list(copy)
    if isinstance(copy, MutableMapping):
        return dict(copy)
    return dict(vars(copy)) if hasattr(copy, "__dict__") else None
