"""Tensors inside what models take and return: containers, dictionaries, dataclasses, in any depth."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a nested value. Objects of unknown kinds hold none."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested value with every tensor changed; containers are copied, objects of unknown kinds stay."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)
        for key, item in value.items():
            changed[key] = map_tensors(item, change)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, map_tensors(getattr(value, field.name), change))
        return twin
    return value


def alias_with(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The same values in the same memory; gradients are changed on their way through.

    It is no view for autograd, so that it may be modified in place like any other result.
    """
    alias: Tensor = _Alias.apply(tensor, change)  # type: ignore[no-untyped-call]
    return alias


class _Alias(torch.autograd.Function):
    generate_vmap_rule = True  # for torch.func

    @staticmethod
    def forward(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Callable[[Tensor], Tensor]], output: Tensor) -> None:
        ctx.change = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad), None
