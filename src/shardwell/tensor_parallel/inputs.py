"""The check that ranks of the tensor axis get the same inputs: they compute parts of the same outputs.

A loader that gives every rank rows of its own is the usual mistake; ranks that sample other tokens are another. Values
are compared in the first forwards of each kind, and now and then in evaluation; shapes whenever there are new ones.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.parallel.collectives import Collectives
from shardwell.parallel.consistency import check_alike
from shardwell.runtime.first_forwards import KindsOfForward
from shardwell.runtime.pytree import tensors_in

_FORWARDS = 2  # of each kind, whose values are compared
_EVERY = 8  # forwards of an evaluation are compared once more: a generation that has parted stays so
_MOST_SHAPES = 1024
_WORDS = (
    "input (the ranks of the tensor axis take the same rows and sample the same tokens, see engine.data_rank and "
    "engine.data_size)"
)


class InputCheck:
    """A forward pre-hook of the model."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self._kinds = KindsOfForward()
        self._shapes: set[tuple[Any, ...]] = set()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise on all ranks of the axis if their inputs differ."""
        if self._comm.device.is_meta:
            return
        found = list(tensors_in((args, kwargs)))
        shapes = tuple((str(one.dtype), *one.shape) for one in found)
        number = self._kinds.count(module, args, kwargs)
        with_values = number < _FORWARDS or (not module.training and number % _EVERY == 0)
        if not with_values and shapes in self._shapes:
            return
        if len(self._shapes) >= _MOST_SHAPES:  # on all ranks together
            self._shapes.clear()
        self._shapes.add(shapes)
        words = {f"tensor {number}": f"{shape[0]} {list(shape[1:])}" for number, shape in enumerate(shapes)}
        if with_values:
            words |= {f"values of tensor {number}": _digest(one) for number, one in enumerate(found)}
        check_alike(self._comm, "forward", {_WORDS: words})


@torch.no_grad()
def _digest(values: Tensor) -> str:
    plain = values.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().tobytes(), digest_size=8).hexdigest()
