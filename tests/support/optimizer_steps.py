"""Tensors for optimizers to step, and gradients that depend on the step alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Groups = list[dict[str, Any]]
SHAPES = [(5, 7), (12,), (3, 2, 4), ()]
MATRICES = [(16, 48), (48, 16), (32, 32), (1, 9), (7, 130)]


def values(shapes: Sequence[tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def run(optimizer: Optimizer, tensors: list[Tensor], num_steps: int = 10) -> list[Tensor]:
    """Step on gradients that depend on the step alone."""
    for step in range(num_steps):
        for tensor, gradient in zip(tensors, values([t.shape for t in tensors], 100 + step), strict=True):
            tensor.grad = gradient.to(tensor)
        optimizer.step()
    return tensors


def reference(groups: Groups, update: Callable[..., Tensor], num_steps: int = 10) -> list[Tensor]:
    """The same, one parameter after the other. `update` gets a parameter, its gradient, its state and the options."""
    tensors = [tensor for group in groups for tensor in group["params"]]
    states: list[dict[str, Any]] = [{} for _ in tensors]
    options = [group for group in groups for _ in group["params"]]
    for step in range(num_steps):
        for i, gradient in enumerate(values([t.shape for t in tensors], 100 + step)):
            tensors[i] = update(tensors[i], gradient, states[i], **options[i])
    return tensors


def two_groups(first: dict[str, Any], second: dict[str, Any]) -> Groups:
    tensors = values(SHAPES)
    return [{"params": tensors[:2], **first}, {"params": tensors[2:], **second}]


def members(groups: Groups) -> list[Tensor]:
    return [tensor for group in groups for tensor in group["params"]]


def close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
