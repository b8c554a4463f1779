"""The three functions of `rounding`, one pass each, as Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _high(bits):
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = ((bits + 0x8000) >> 16) & 0xFFFF
    canonical = ((bits >> 16) & 0x8000) | 0x7FC0
    return tl.where(is_nan, canonical, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _to_bf16(source, out, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    bits = tl.load(source + at, mask=inside).to(tl.int32, bitcast=True)
    tl.store(out + at, _high(bits), mask=inside)


@triton.jit
def _split(master, high, low, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    bits = tl.load(master + at, mask=inside).to(tl.int32, bitcast=True)
    tl.store(high + at, _high(bits), mask=inside)
    tl.store(low + at, (bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True), mask=inside)


@triton.jit
def _join(high, low, out, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    upper = tl.load(high + at, mask=inside).to(tl.int16, bitcast=True).to(tl.int32) << 16
    is_nan = (upper & 0x7FFFFFFF) > 0x7F800000
    bits = tl.where(is_nan, upper, upper + tl.load(low + at, mask=inside).to(tl.int32))
    tl.store(out + at, bits.to(tl.float32, bitcast=True), mask=inside)


def _grid(numel: int) -> tuple[int]:
    return (triton.cdiv(numel, _BLOCK),)


def to_bf16(source: Tensor, out: Tensor) -> None:
    if source.numel():
        _to_bf16[_grid(source.numel())](source, out, source.numel(), BLOCK=_BLOCK)


def split(master: Tensor, high: Tensor, low: Tensor) -> None:
    if master.numel():
        _split[_grid(master.numel())](master, high, low, master.numel(), BLOCK=_BLOCK)


def join(high: Tensor, low: Tensor, out: Tensor) -> None:
    if out.numel():
        _join[_grid(out.numel())](high, low, out, out.numel(), BLOCK=_BLOCK)
