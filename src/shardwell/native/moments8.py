"""Moments in 8 bits as torch operations; native/moments8.h says what a code means."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwell.native.stretch import BLOCK, Moments8

_MAGNITUDE, _ALL = 0x7FFFFFFF, 0xFFFFFFFF
_DROPPED = 20  # bits of an fp32 number that a code leaves out
_BELOW = 2**_DROPPED - 1
_SPAN1, _SPAN2 = 15, 31  # exponents below the block's that have codes


def decode(moments: Moments8, span: slice) -> tuple[Tensor, Tensor]:
    """Both moments of the elements in `span`, which begins with a block, as fp32."""
    code1, code2 = (codes[span].long() for codes in moments.codes)
    base1, base2 = _bases(moments, span)
    magnitude = _floats(((code1 & 0x7F) + base1) << _DROPPED) - _floats(base1 << _DROPPED)
    return torch.where(code1 < 0x80, magnitude, -magnitude), _floats((code2 + base2) << _DROPPED)


def encode(moments: Moments8, span: slice, first: Tensor, second: Tensor, seed: int) -> None:
    """Store both moments of the elements in `span`, which begins with a block."""
    for values, exponents in zip((first, second), moments.exponents, strict=True):
        exponents[_blocks(span)] = _exponents(values)
    base1, base2 = _bases(moments, span)
    chance = _hash(torch.arange(span.start, span.stop) & _ALL ^ _hash(torch.tensor(seed & _ALL)))
    shifted = _bits(first.abs() + _floats(base1 << _DROPPED))
    code1 = (((shifted + ((chance & 0xFFF) << 8)) >> _DROPPED) - base1).clamp(max=0x7F) + 0x80 * torch.signbit(first)
    code2 = (((_bits(second) + (chance >> 12)) >> _DROPPED) - base2).clamp(0, 0xFF)
    moments.codes[0][span] = code1.masked_fill(first.isnan(), 0x7F).to(torch.uint8)
    moments.codes[1][span] = code2.masked_fill(second.isnan(), 0xFF).to(torch.uint8)


def _blocks(span: slice) -> slice:
    return slice(span.start // BLOCK, -(-span.stop // BLOCK))


def _bases(moments: Moments8, span: slice) -> tuple[Tensor, Tensor]:
    """For each element the top of the number whose code is 0."""
    base1, base2 = (
        ((exponents[_blocks(span)].long() - least).clamp(min=0) * 8).repeat_interleave(BLOCK)
        for exponents, least in zip(moments.exponents, (_SPAN1, _SPAN2), strict=True)
    )
    return base1[: span.stop - span.start], base2[: span.stop - span.start]


def _exponents(values: Tensor) -> Tensor:
    """The exponent of the greatest number of each block, once that is rounded up."""
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))
    greatest = _bits(padded).view(-1, BLOCK).amax(dim=1)
    exponents: Tensor = (greatest + _BELOW) >> 23
    return exponents.clamp(max=255).to(torch.uint8)  # 255: inf and NaN


def _hash(value: Tensor) -> Tensor:
    """32 bits from 32 bits, in int64."""
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & _ALL
    value = ((value ^ (value >> 15)) * 0x846CA68B) & _ALL
    return value ^ (value >> 16)


def _bits(values: Tensor) -> Tensor:
    """Of the magnitudes."""
    return values.view(torch.int32).long() & _MAGNITUDE


def _floats(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)
