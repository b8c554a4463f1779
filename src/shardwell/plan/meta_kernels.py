"""Operations on meta tensors, each computed once: what it returns follows from the sizes of its inputs.

Many operations have meta forms in Python that take a millisecond, and a plan runs the same ones in each block, step and
simulation. What an operation made is remembered by its sizes, strides and dtype, and made again without the operation.
Operations that write to their inputs, return views of them, or see other tensors than plain meta ones run as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_MOST = 1 << 16  # results that are remembered
_TENSORS = frozenset({Tensor, nn.Parameter})
_VALUES = frozenset(
    {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)  # fmt: skip
_results: dict[Any, Any] = {}
_making_new: dict[Any, bool] = {}
_UNKNOWN, _OTHER = object(), object()  # not seen yet; runs as it is


@dataclass(frozen=True)
class _Made:
    """A new tensor of an operation."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _NotPlainError(Exception):
    """An input that is neither a value nor a plain meta tensor."""


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operation returns for these arguments."""
    makes_new = _making_new.get(func)
    if makes_new is None:
        makes_new = _making_new[func] = _makes_new(func)
    if not makes_new:
        return func(*args, **kwargs)
    try:
        key: Any = (func, torch.get_default_dtype(), _described(args))
        if kwargs:
            key += tuple([(name, _described(value)) for name, value in kwargs.items()])
    except _NotPlainError:
        return func(*args, **kwargs)
    known = _results.get(key, _UNKNOWN)
    if known is not _UNKNOWN and known is not _OTHER:
        return _made(known)
    result = func(*args, **kwargs)
    if known is _UNKNOWN and len(_results) < _MOST:
        _results[key] = _remembered(result, {one.untyped_storage()._cdata for one in tensors_in((args, kwargs))})
    return result


def _makes_new(func: Any) -> bool:
    """Return whether an operation of torch says that it neither writes to its inputs nor returns views of them."""
    schema = func._schema
    names = [one.alias_info for one in (*schema.arguments, *schema.returns)]
    return func.namespace == "aten" and bool(schema.returns) and all(one is None for one in names)


def _described(value: Any) -> Any:
    """Return what decides about a result: of tensors sizes, strides and dtype."""
    kind = type(value)
    if kind in _TENSORS:
        if not value.is_meta or value.layout is not torch.strided:
            raise _NotPlainError
        return value.shape, value.stride(), value.dtype
    if kind is list or kind is tuple:
        return tuple([_described(one) for one in value])
    if kind not in _VALUES:
        raise _NotPlainError
    return kind, value


def _remembered(result: Any, given: set[int]) -> Any:
    """Return the form of a result, from which it is made again; `_OTHER` if it is not of new plain tensors."""
    if type(result) is Tensor:
        if result.layout is not torch.strided:
            return _OTHER
        storage, form = result.untyped_storage(), _Made(tuple(result.shape), result.stride(), result.dtype)
        is_plain = result.is_meta and not result.storage_offset()
        if not is_plain or storage._cdata in given:
            return _OTHER
        given.add(storage._cdata)  # no two results share one
        return form if _made(form).untyped_storage().nbytes() == storage.nbytes() else _OTHER
    if type(result) in (tuple, list):
        forms = [_remembered(one, given) for one in result]
        return _OTHER if any(form is _OTHER for form in forms) else type(result)(forms)
    return result if result is None or type(result) in (bool, int) else _OTHER


def _made(form: Any) -> Any:
    if type(form) is _Made:
        return torch.empty_strided(form.size, form.stride, dtype=form.dtype, device="meta")
    if type(form) in (tuple, list):
        return type(form)([_made(one) for one in form])
    return form


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in the arguments or the result of an operation."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    kind = type(value)
    if kind in _TENSORS:
        found.append(value)
    elif kind is tuple or kind is list:
        for one in value:
            kind = type(one)
            if kind in _TENSORS:
                found.append(one)
            elif kind not in _VALUES:
                _collect(one, found)
    elif kind is dict:
        for one in value.values():
            _collect(one, found)
    elif kind not in _VALUES:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict):  # their subclasses
            _collect(dict(value) if isinstance(value, dict) else list(value), found)
