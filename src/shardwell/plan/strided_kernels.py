"""Which operations read or write tensors that are not in one order, on a GPU.

Kernels over contiguous tensors of one shape move several elements at a time, at the rate of the memory. Those over
other tensors (halves of heads, transposed or broadcast ones) compute the place of each element, which takes longer than
moving it. A concatenation and a copy that makes a tensor contiguous are such kernels, too, and slower ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_COPIES = ("aten::cat", "aten::clone", "aten::_to_copy", "aten::copy_")


def strided_elements(func: Any, read: Iterable[Tensor], written: Iterable[Tensor]) -> tuple[int, bool]:
    """Return the elements that an operation computes the places of, 0 if none, and whether it copies them."""
    is_copy, is_pointwise = _kind(func)
    if not is_copy and not is_pointwise:
        return 0, False
    sources, results = list(read), list(written)
    if not results or not sources:
        return 0, False
    largest = max(results, key=Tensor.numel)
    is_plain = all(
        one.is_contiguous() and (is_copy or one.numel() == 1 or one.shape == largest.shape)
        for one in (*sources, *results)
    )
    return (0, False) if is_plain else (largest.numel(), is_copy)


@functools.cache
def _kind(func: Any) -> tuple[bool, bool]:
    is_copy = func._overloadpacket._qualified_op_name in _COPIES
    return is_copy, not is_copy and torch.Tag.pointwise in func.tags
