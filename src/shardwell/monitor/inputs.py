"""What inputs and output of a model's forward say about a micro-step: its size and its loss. Only shapes are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_TOKENS = ("input_ids", "tokens", "decoder_input_ids")


@dataclass(slots=True)
class BatchSize:
    """Samples and tokens of some micro-steps on this rank, and the length of the last sequence."""

    samples: int = 0
    tokens: int = 0  # 0 if the inputs are no tokens
    length: int = 0
    last_samples: int = 0

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Add one more micro-step."""
        first = kwargs.get("input_ids") if not args else args[0] if not kwargs else None
        if isinstance(first, Tensor) and first.dtype is torch.int64 and len(shape := first.shape) == 2:
            self.last_samples, length = shape  # nearly always: what size_of would find, in less time
        else:
            self.last_samples, length = size_of(args, kwargs)
        self.samples += self.last_samples
        self.tokens += self.last_samples * length
        self.length = length or self.length


def size_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the samples of one micro-step, the first dimension of an input, and how many tokens each has, or 0.

    Integers of two dimensions are tokens.
    """
    named = next((kwargs[name] for name in _TOKENS if isinstance(kwargs.get(name), Tensor)), None)
    found = [named] if named is not None else _tensors((*args, *kwargs.values()))
    for tensor in found:
        if tensor.dim() == 2 and not tensor.is_floating_point() and not tensor.is_complex():
            return tensor.shape[0], tensor.shape[1]
    for tensor in found:
        if tensor.dim():
            return tensor.shape[0], 0
    return 0, 0


def _tensors(values: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors among arguments, and in the containers that they are."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, Mapping):
            named = [value[name] for name in _TOKENS if isinstance(value.get(name), Tensor)]
            found += named or _tensors(tuple(value.values()))
        elif isinstance(value, list | tuple):
            found += _tensors(tuple(value))
    return found


def loss_in(output: Any) -> Tensor | None:
    """Return the loss that a model computed itself, or None if its output does not show one."""
    for found in (output, getattr(output, "loss", None), output.get("loss") if isinstance(output, Mapping) else None):
        if isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad:
            return found.detach().reshape(())  # a reference to the graph would keep activations alive
    return None
