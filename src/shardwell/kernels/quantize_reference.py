"""Quantisation as torch operations, on any device: the reference for the kernels, and the fallback without them.

The division is by a tensor, because torch multiplies by the inverse on CUDA if the divisor is a number. No code needs
to be clipped: a scale is rounded up, and the error of the division and the products is less than what rounding to a
code removes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwell.kernels.quantized_format import ALIGNMENT, BLOCK, LEAST_SCALE, SHARE, Kind, num_code_bytes, packed_bytes

_CHUNK = 2**18  # elements at a time, so that temporaries stay small
_MAGNITUDE, _INFINITE = 0x7FFFFFFF, 0x7F800000
_NAN = 0x7FC0  # in bf16


@torch.no_grad()
def encode(kind: Kind, source: Tensor, out: Tensor) -> None:
    codes, scales = _parts(kind, out, source.shape[-1])
    codes[..., -ALIGNMENT:] = 0  # including the padding
    scales[..., -ALIGNMENT:] = 0
    for span in _spans(source):
        values = _blocks(source[..., span].float())
        upper = _upper_halves(kind, values)
        code = _codes(kind, values, _wide(upper)).flatten(-2)[..., : span.stop - span.start]
        _bytes_of(kind, codes, span).copy_(_packed(kind, code))
        first = 2 * (span.start // BLOCK)
        for place, part in enumerate((upper & 0xFF, upper >> 8)):
            scales[..., first + place : first + 2 * upper.shape[-1] : 2] = part


@torch.no_grad()
def decode(kind: Kind, data: Tensor, out: Tensor) -> None:
    for span in _spans(out):
        out[..., span] = _decoded(kind, data, out.shape[-1], span)


@torch.no_grad()
def decode_sum(kind: Kind, data: Tensor, out: Tensor, factor: float, add: bool) -> None:
    for span in _spans(out):
        total = _decoded(kind, data[0], out.shape[-1], span)
        for message in data[1:]:
            total += _decoded(kind, message, out.shape[-1], span)
        total *= factor
        out[..., span] = out[..., span] + total if add else total


@torch.no_grad()
def encode_rows(kind: Kind, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (n, m), of int8 or fp8, and scales (n, 1) of bf16, of rows (n, m): one block for each row.

    This is the arithmetic of `encode` with blocks as long as rows, for formats that have a scale for each row.
    """
    values = rows.float().contiguous()
    upper = _upper_halves(kind, values)
    codes = _codes(kind, values, _wide(upper))
    return codes.view(torch.float8_e4m3fn if kind == "fp8" else torch.int8), _wide(upper).bfloat16().unsqueeze(-1)


@torch.no_grad()
def error_bound(kind: Kind, source: Tensor) -> Tensor:
    values = _blocks(source.float())
    scale = _wide(_upper_halves(kind, values)).unsqueeze(-1)
    size = values.abs()
    bound = size / 16 + scale / 1024 if kind == "fp8" else (scale * (0.5 + 2**-16)).expand_as(size)
    return torch.where(scale == 0, size, bound).flatten(-2)[..., : source.shape[-1]]


def _spans(values: Tensor) -> Iterator[slice]:
    """Yield parts of all rows that begin at a block."""
    numel = values.shape[-1]
    num_rows = max(1, values.numel() // max(1, numel))
    step = max(1, _CHUNK // BLOCK // num_rows) * BLOCK
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


def _parts(kind: Kind, data: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    size = num_code_bytes(kind, numel)
    return data[..., :size], data[..., size:]


def _bytes_of(kind: Kind, codes: Tensor, span: slice) -> Tensor:
    """Return the codes of elements that begin at a block."""
    return codes[..., packed_bytes(kind, span.start) : packed_bytes(kind, span.stop)]


def _blocks(values: Tensor) -> Tensor:
    """Return the values in blocks, padded with zeros."""
    blocks: Tensor = pad(values, (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    return blocks


def _upper_halves(kind: Kind, blocks: Tensor) -> Tensor:
    """Return the scales as bits of bf16: the greatest value / the largest code, rounded up."""
    greatest = (blocks.view(torch.int32) & _MAGNITUDE).amax(-1)
    share = greatest.view(torch.float32) * SHARE[kind]
    upper = (share.view(torch.int32) + 0xFFFF) >> 16
    upper = upper.masked_fill(_wide(upper) < LEAST_SCALE, 0)
    return upper.masked_fill(greatest >= _INFINITE, _NAN)


def _wide(upper: Tensor) -> Tensor:
    return (upper << 16).view(torch.float32)


def _codes(kind: Kind, blocks: Tensor, scale: Tensor) -> Tensor:
    """Return the codes as uint8. They are 0 in blocks that the scale alone describes."""
    usable = scale > 0
    inverse = torch.ones_like(scale) / scale.where(usable, 1.0)
    scaled = (blocks * inverse.unsqueeze(-1)).where(usable.unsqueeze(-1), 0.0)
    if kind == "fp8":
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return scaled.round().to(torch.int8).view(torch.uint8)


def _packed(kind: Kind, codes: Tensor) -> Tensor:
    """Return codes of one byte each as the bytes of a row: the inverse of `_numbers`' first step."""
    if kind != "int4":
        return codes
    padded: Tensor = pad(codes, (0, codes.shape[-1] % 2))
    return padded[..., 0::2] & 15 | padded[..., 1::2] << 4


def _decoded(kind: Kind, data: Tensor, numel: int, span: slice) -> Tensor:
    """Return fp32 values in new memory."""
    codes, scales = _parts(kind, data, numel)
    first, last = span.start // BLOCK, -(-span.stop // BLOCK)
    low, high = (scales[..., 2 * first + place : 2 * last : 2].int() for place in (0, 1))
    values = _numbers(kind, _bytes_of(kind, codes, span).contiguous())[..., : span.stop - span.start]
    decoded = _blocks(values) * _wide(low | high << 8).unsqueeze(-1)
    return decoded.flatten(-2)[..., : span.stop - span.start]


def _numbers(kind: Kind, codes: Tensor) -> Tensor:
    """Return the numbers that the bytes of a row stand for, in units of the scale."""
    if kind == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    if kind == "int4":
        return torch.stack(((codes & 15 ^ 8).int() - 8, (codes >> 4 ^ 8).int() - 8), -1).flatten(-2).float()
    if kind == "int8":
        return codes.view(torch.int8).float()
    raise AssertionError(f"no arithmetic for {kind}")
