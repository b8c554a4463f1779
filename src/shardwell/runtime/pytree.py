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


def map_tensors(value: Any, change: Callable[[Tensor], Tensor], copies: list[tuple[Any, Any]] | None = None) -> Any:
    """The same nested value with every tensor changed. Each tensor is changed once, however often it is there.

    Containers in which nothing changes stay the same objects, as do objects of unknown kinds. The others are copied;
    `copies` gets pairs of containers that can be changed, and of tensors: as they were, and as they are now.
    """
    if isinstance(value, Tensor):
        return change(value)
    known: dict[int, Any] = {}
    alive: list[Any] = [value]  # also as a stack: containers may make what is in them as they are asked
    is_same, at = True, 0
    while at < len(alive):
        one = alive[at]
        at += 1
        if id(one) in known:
            continue
        if isinstance(one, Tensor):
            known[id(one)] = changed = change(one)
            if changed is not one:
                is_same = False
                if copies is not None:
                    copies.append((one, changed))
        elif inside := _inside(one):
            known[id(one)] = one
            alive.extend(inside)
    if is_same:
        return value
    tensors = {id(one): known[id(one)] for one in alive if isinstance(one, Tensor)}
    return _rebuilt(value, change, tensors, copies if copies is not None else [])


def _inside(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, MutableMapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)]
    return []


def _rebuilt(
    value: Any, change: Callable[[Tensor], Tensor], known: dict[int, Any], copies: list[tuple[Any, Any]]
) -> Any:
    """A copy, where something in it is another now; `known` has what became of tensors, and of containers so far."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Tensor):
        return change(value)
    inside = _inside(value)
    if not inside:
        return value
    twin = value
    if not isinstance(value, tuple):
        known[id(value)] = twin = copy.copy(value)  # before what is in it, where it may be again
    items = [_rebuilt(item, change, known, copies) for item in inside]
    if all(item is before for item, before in zip(items, inside, strict=True)):
        known[id(value)] = value
        return value
    if isinstance(value, tuple):
        known[id(value)] = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return known[id(value)]
    if isinstance(value, list):
        twin[:] = items
    elif isinstance(value, MutableMapping):
        for key, item in zip(value, items, strict=True):
            twin[key] = item
    else:
        names = (field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
        for name, item in zip(names, items, strict=True):
            object.__setattr__(twin, name, item)
    copies.append((value, twin))
    return twin


def alias_with(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The same values in the same memory; gradients are changed on their way through.

    It is no view for autograd, so that it may be modified in place like any other result.
    """
    alias: Tensor = _AliasFunction.apply(tensor, change)  # type: ignore[no-untyped-call]
    return alias


class _AliasFunction(torch.autograd.Function):
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
