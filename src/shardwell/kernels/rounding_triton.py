"""The elementwise functions of `rounding` and the digest of `sharding/edits.py` as Triton kernels of one pass."""

from __future__ import annotations

import torch
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
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, upper, bits)  # parts do not match: see `rounding.join`
    tl.store(out + at, bits.to(tl.float32, bitcast=True), mask=inside)


@triton.jit
def _adopt(masters, values, numel, HALVES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    master = tl.load(masters + at, mask=inside)
    value = tl.load(values + at, mask=inside)
    if HALVES:
        rounded = _high(master.to(tl.int32, bitcast=True))
    else:
        rounded = master.to(value.dtype)
    tl.store(masters + at, value.to(master.dtype), mask=inside & (rounded != value))


@triton.jit
def _digest(words, out, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at, mask=at < numel, other=0).to(tl.int64)
    mixed = (word + at * 0x2545F4914F6CDD1D) * 0x369DEA0F31A53F85
    mixed = (mixed ^ (mixed >> 29)) * 0x27BB2EE687B0B0FD
    mixed = tl.where(at < numel, mixed ^ (mixed >> 32), 0)
    tl.atomic_add(out, tl.sum(mixed, axis=0))


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


def adopt(masters: Tensor, values: Tensor) -> None:
    """Overwrite master weights where `values` is not their rounded value."""
    if masters.numel():
        halves = values.dtype is torch.bfloat16 and masters.dtype is torch.float32
        _adopt[_grid(masters.numel())](masters, values, masters.numel(), HALVES=halves, BLOCK=_BLOCK)


def digest(values: Tensor) -> Tensor:
    """Return a hash of the values and their positions."""
    words = values.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])
    out = torch.zeros(1, dtype=torch.int64, device=values.device)
    if words.numel():
        _digest[_grid(words.numel())](words, out, words.numel(), BLOCK=_BLOCK)
    return out
