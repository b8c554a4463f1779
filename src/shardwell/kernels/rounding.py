"""Conversion between fp32 and bf16: one rounding for every stage, kernel and tier.

A bf16 number is the upper half of an fp32 number. Rounding half away from zero, `(bits + 0x8000) >> 16`, makes the
lower half recoverable as a signed 16-bit remainder, so a bf16 parameter and 16 more bits *are* the fp32 master weight:

    master bits = (high bits << 16) + remainder        with remainder in [-0x8000, 0x7fff]

Round-to-nearest-even has one preimage too many for that. A NaN with a full payload would round to -0.0, so NaN is
treated separately: its bf16 part is the canonical NaN of its sign.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwell import virtual_time

_HALF = 0x8000
_SPAN = 1 << 17  # elements at a time: temporary tensors stay small, and in a cache


def narrow(source: Tensor, out: Tensor) -> Tensor:
    """Round `source` into `out`, whatever its dtype."""
    if out.dtype is torch.bfloat16 and source.dtype is torch.float32:
        return to_bf16(source, out)
    return out.copy_(source)


def to_bf16(source: Tensor, out: Tensor) -> Tensor:
    """Round fp32 `source` into bf16 `out`, half away from zero."""
    if source.is_meta:
        virtual_time.touch(source, out)
        return out
    if source.is_cuda:
        from shardwell.kernels.rounding_triton import to_bf16 as kernel

        kernel(source, out)
        return out
    _high_bits(source, out)
    return out


def split(master: Tensor, high: Tensor, low: Tensor) -> None:
    """Write fp32 `master` as bf16 `high` and int16 `low`, exactly (NaN stays NaN)."""
    if master.is_meta:
        virtual_time.touch(master, high, low)
        return
    if master.is_cuda:
        from shardwell.kernels.rounding_triton import split as kernel

        kernel(master, high, low)
        return
    _high_bits(master, high)
    # The low 16 bits, read as signed, are the remainder: bits - (((bits + 0x8000) >> 16) << 16).
    low.copy_(master.view(torch.int16)[0::2])


def join(high: Tensor, low: Tensor, out: Tensor) -> Tensor:
    """Write fp32 `out` from bf16 `high` and int16 `low`: the inverse of `split`.

    If `high` was changed since the split, `out` still rounds to it.
    """
    if out.is_meta:
        virtual_time.touch(high, low, out)
        return out
    if out.is_cuda:
        from shardwell.kernels.rounding_triton import join as kernel

        kernel(high, low, out)
        return out
    for part in _spans(out):
        _join(high[part], low[part], out[part])
    return out


def adopt(masters: Tensor, values: Tensor) -> None:
    """Set master weights (1D) to the values (1D, compute dtype, same device) that are not their roundings."""
    if masters.is_meta:
        virtual_time.touch(masters, values)
        return
    if masters.is_cuda:
        from shardwell.kernels.rounding_triton import adopt as kernel

        kernel(masters, values)
        return
    for part in _spans(masters):
        mine, theirs = masters[part], values[part]
        rounded = mine if mine.dtype == theirs.dtype else narrow(mine, torch.empty_like(theirs))
        if not torch.equal(rounded, theirs):
            mine.copy_(torch.where(rounded == theirs, mine, theirs.to(mine.dtype)))


def _spans(tensor: Tensor) -> Iterator[slice]:
    """Yield slices that cover a 1D tensor."""
    return (slice(start, start + _SPAN) for start in range(0, tensor.numel(), _SPAN))


def _join(high: Tensor, low: Tensor, out: Tensor) -> None:
    bits = out.view(torch.int32)
    bits.copy_(high.view(torch.int16))
    bits.bitwise_left_shift_(16)
    bits.add_(low)
    # A NaN stays a NaN, whatever is added. Any other NaN is a zero with a negative remainder or an infinity with a
    # positive one: the two parts do not belong together, because the bf16 part was edited.
    nan = torch.isnan(out)
    if nan.any():
        out.copy_(torch.where(nan, high.to(out.dtype), out))


def _high_bits(source: Tensor, out: Tensor) -> None:
    for part in _spans(source):
        given, rounded = source[part], out[part]
        bits = given.view(torch.int32) + _HALF
        rounded.view(torch.int16).copy_(bits.view(torch.int16)[1::2])
        rounded.masked_fill_(torch.isnan(given), float("nan"))
