"""8-bit moments as torch operations; native/moments8.h defines the codes."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwell.kernels.update_args import BLOCK, Moments8bitArgs

_MAGNITUDE, _ALL = 0x7FFFFFFF, 0xFFFFFFFF
_DROPPED = 20  # bits of an fp32 number that a code leaves out
_BELOW = 2**_DROPPED - 1
_SPAN1, _SPAN2 = 15, 31  # exponents below the block's that have codes


def decode(moments: Moments8bitArgs, span: slice) -> tuple[Tensor, Tensor]:
    """Return both moments of the elements in `span`, which begins at a block, as fp32."""
    (codes1, codes2), (exponents1, exponents2) = moments.codes, moments.exponents
    return decode_first(codes1, exponents1, span), decode_second(codes2, exponents2, span)


def decode_first(codes: Tensor, exponents: Tensor, span: slice) -> Tensor:
    """Return first moments of the elements in `span`, as fp32."""
    code, base = codes[span].long(), _bases(exponents, span, _SPAN1)
    magnitude = _floats(((code & 0x7F) + base) << _DROPPED) - _floats(base << _DROPPED)
    return torch.where(code < 0x80, magnitude, -magnitude)


def decode_second(codes: Tensor, exponents: Tensor, span: slice) -> Tensor:
    """Return second moments of the elements in `span`, as fp32."""
    return _floats((codes[span].long() + _bases(exponents, span, _SPAN2)) << _DROPPED)


def encode(moments: Moments8bitArgs, span: slice, first: Tensor, second: Tensor, seed: int) -> None:
    """Store both moments of the elements in `span`, which begins at a block."""
    encode_first(moments.codes[0], moments.exponents[0], span, first, seed)
    encode_second(moments.codes[1], moments.exponents[1], span, second, seed)


def encode_first(
    codes: Tensor, exponents: Tensor, span: slice, values: Tensor, seed: int, given: Tensor | None = None
) -> None:
    """Store first moments. `given` are the exponents of the blocks; by default the least ones are used."""
    exponents[_blocks(span)] = _exponents(values) if given is None else given
    base, chance = _bases(exponents, span, _SPAN1), _chances(span, seed) & 0xFFF
    shifted = _bits(values.abs() + _floats(base << _DROPPED))
    code = (((shifted + (chance << 8)) >> _DROPPED) - base).clamp(max=0x7F) + 0x80 * torch.signbit(values)
    codes[span] = code.masked_fill(values.isnan(), 0x7F).to(torch.uint8)


def encode_second(
    codes: Tensor, exponents: Tensor, span: slice, values: Tensor, seed: int, given: Tensor | None = None
) -> None:
    """Store second moments. `given` are the exponents of the blocks; by default the least ones are used."""
    exponents[_blocks(span)] = _exponents(values) if given is None else given
    base, chance = _bases(exponents, span, _SPAN2), _chances(span, seed) >> 12
    code = (((_bits(values) + chance) >> _DROPPED) - base).clamp(0, 0xFF)
    codes[span] = code.masked_fill(values.isnan(), 0xFF).to(torch.uint8)


def _chances(span: slice, seed: int) -> Tensor:
    return _hash(
        torch.arange(span.start, span.stop, device="cpu") & _ALL ^ _hash(torch.tensor(seed & _ALL, device="cpu"))
    )


def _blocks(span: slice) -> slice:
    return slice(span.start // BLOCK, -(-span.stop // BLOCK))


def _bases(exponents: Tensor, span: slice, least: int) -> Tensor:
    """Return for each element the upper bits of the number whose code is 0."""
    bases = ((exponents[_blocks(span)].long() - least).clamp(min=0) * 8).repeat_interleave(BLOCK)
    return bases[: span.stop - span.start]


def _exponents(values: Tensor) -> Tensor:
    """Return the exponent of the greatest value of each block, after that is rounded up."""
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))
    greatest = _bits(padded).view(-1, BLOCK).amax(dim=1)
    exponents: Tensor = (greatest + _BELOW) >> 23
    return exponents.clamp(max=255).to(torch.uint8)  # 255: inf and NaN


def _hash(value: Tensor) -> Tensor:
    """Hash 32 bits to 32 bits, in int64."""
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & _ALL
    value = ((value ^ (value >> 15)) * 0x846CA68B) & _ALL
    return value ^ (value >> 16)


def _bits(values: Tensor) -> Tensor:
    """Return the bits of the magnitudes."""
    return values.view(torch.int32).long() & _MAGNITUDE


def _floats(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)
