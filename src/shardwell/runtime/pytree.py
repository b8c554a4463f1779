"""Tensors in the nested arguments and results of models: containers, dictionaries and dataclasses at any depth.

A batch is moved to the device, and to the compute dtype under mixed precision. A model may change the containers that
it is called with: append to a list, set a key. Where nothing had to be moved, the model gets the caller's own
containers. Where it gets copies, what it did to them is done to the caller's containers afterwards (`CopiedInputs`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a nested value. Objects of unknown types are taken to hold none."""
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
    """Return the same nested value with every tensor changed. A tensor that occurs several times is changed once.

    Containers in which nothing changes stay the same objects, as do objects of unknown types. The others are copied;
    `copies` receives pairs (original, copy) of the mutable containers and of the tensors.
    """
    if isinstance(value, Tensor):
        return change(value)
    known: dict[int, Any] = {}
    alive: list[Any] = [value]  # keeps ids valid, and is the stack: containers may create their items on access
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
    """Return the items of a container; none for tensors and objects of unknown types."""
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
    """Return a copy of a value if something in it has changed, else the value.

    `known` maps the id of a tensor, or of a container that was visited, to its replacement.
    """
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Tensor):
        return change(value)
    inside = _inside(value)
    if not inside:
        return value
    twin = value
    if not isinstance(value, tuple):
        known[id(value)] = twin = copy.copy(value)  # before its items, which may contain the value again
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


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return `value` with its tensors on `device`, floating-point ones in `dtype` if given.

    Unknown containers stay as they are.
    """
    return map_tensors(value, mover(device, dtype))


def mover(device: torch.device, dtype: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function that moves a tensor to `device` and, if it is floating-point, to `dtype`."""
    if dtype is None:
        return methodcaller("to", device, non_blocking=True)

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)

    return move


class CopiedInputs:
    """Containers in the arguments of a forward that were copied, because tensors in them were moved."""

    def __init__(self, copies: list[tuple[Any, Any]]) -> None:
        """Remember the contents of `copies`, pairs (original, copy) as `map_tensors` collects them."""
        self._copies = copies
        self._before = [_contents(twin) for _, twin in copies]

    def give_back(self) -> None:
        """Apply what the forward did to the copies to the caller's containers, with the caller's own tensors."""
        own = {id(twin): original for original, twin in self._copies}
        for (original, twin), before in zip(self._copies, self._before, strict=True):
            if before is None:
                continue
            now = _contents(twin)
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


def _contents(value: Any) -> Any:
    """Return what can change in a container; None for tensors, and for objects without attributes of their own."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, list):
        return list(value)
    if isinstance(value, MutableMapping):
        return dict(value)
    return dict(vars(value)) if hasattr(value, "__dict__") else None


def alias_with(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor with the same values in the same memory, whose gradient passes through `change` in backward.

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
