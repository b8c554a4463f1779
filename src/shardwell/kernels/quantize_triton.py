"""Quantisation as Triton kernels: a program handles some blocks of a row.

The kernels work on bits where a device or a compiler might round differently, and no product and sum are fused. Almost
all programs have full blocks only, which need no masks and access memory at multiples of 16 bytes. The strides of two
dimensions locate the rows of a tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from shardwell.kernels.quantized_format import BLOCK, SHARE, Kind, num_blocks, num_code_bytes, num_scale_bytes, rows_of

KINDS: tuple[Kind, ...] = ("int8", "int4", "fp8")  # with a kernel
_BLOCKS = 8  # blocks of a program: as many as have 16 bytes of scales, or a multiple
_ENCODING_WARPS, _DECODING_WARPS = 2, 4
_FEW = 8  # number of messages up to which a kernel is specialised: all of them are read at the same time
_NARROW_CONVERSIONS = (8, 9)  # the first compute capability with fp8 conversions


@triton.jit
def _place(inner, num_groups, BLOCKS: tl.constexpr):
    """Return the outer and inner index of the row, and its first block."""
    program = tl.program_id(0)
    row = program // num_groups
    return (row // inner).to(tl.int64), (row % inner).to(tl.int64), (program % num_groups).to(tl.int64) * BLOCKS


@triton.jit
def _greater(first, second):
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scale_bits(values, SHARE: tl.constexpr):
    """Return the bits of a bf16 scale for each block; those of NaN if a value is not finite."""
    share = tl.reduce(tl.abs(values), 1, _greater) * SHARE
    bits = share.to(tl.int32, bitcast=True)
    upper = (bits + 0xFFFF) >> 16
    upper = tl.where(upper < 0x0580, 0, upper)  # 2^-116
    return tl.where((bits & 0x7FFFFFFF) >= 0x7F800000, 0x7FC0, upper)


@triton.jit
def _to_e4m3(values, NARROW: tl.constexpr):
    if NARROW:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0  # rounds to a multiple of 2^-9
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - 0x3C000000) >> 20
    return tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _to_integer(values):
    return (values + 12582912.0).to(tl.int32, bitcast=True)  # rounds; the integer is in the low bits


@triton.jit
def _from_e4m3(codes, NARROW: tl.constexpr):
    if NARROW:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    codes = codes.to(tl.int32)
    magnitude = codes & 0x7F
    subnormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    normal = tl.where(magnitude == 0x7F, 0x7FC00000, (magnitude << 20) + 0x3C000000)
    bits = tl.where(magnitude < 8, subnormal, normal)
    return tl.where(codes < 0x80, bits, bits | -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def _from_integer(codes, SIGN: tl.constexpr):
    """Convert integers whose sign is in this bit, in the low bits: they become the last digits of 2^23 and more."""
    return ((codes ^ SIGN) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + SIGN)


@triton.jit
def _encode_blocks(
    source,
    codes,
    scales,
    left,
    code_bytes_left,
    scales_left,
    KIND: tl.constexpr,
    SHARE: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    block = tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        values = tl.load(source + at).to(tl.float32)
    else:
        values = tl.load(source + at, mask=at < left, other=0.0).to(tl.float32)
    upper = _scale_bits(values, SHARE)
    usable = (upper > 0) & (upper < 0x7F80)
    scale = (tl.where(usable, upper, 0x3F80) << 16).to(tl.float32, bitcast=True)
    scaled = values * libdevice.rcp_rn(scale)[:, None]
    kept = tl.where(usable, 0xFF, 0)[:, None]
    if KIND == "int4":
        low, high = tl.split(tl.reshape(_to_integer(scaled), (BLOCKS, BLOCK // 2, 2)))
        code = ((low & 15) | (high << 4)) & kept
        to = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    elif KIND == "fp8":
        code = _to_e4m3(scaled, NARROW) & kept
        to = at
    else:
        code = _to_integer(scaled) & kept
        to = at
    if WHOLE:
        tl.store(codes + to, code.to(tl.uint8))
        tl.store(scales + block, upper.to(tl.int16))
    else:
        tl.store(codes + to, code.to(tl.uint8), mask=to < code_bytes_left)
        tl.store(scales + block, upper.to(tl.int16), mask=block < scales_left)


@triton.jit
def _encode(
    source,
    out,
    numel,
    code_bytes,
    num_scales,
    inner,
    num_groups,
    source_outer,
    source_inner,
    out_outer,
    out_inner,
    KIND: tl.constexpr,
    SHARE: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE_BYTES: tl.constexpr,
):
    i, j, first = _place(inner, num_groups, BLOCKS)
    source += i * source_outer + j * source_inner + first * BLOCK
    out += i * out_outer + j * out_inner
    codes, scales = out + first * CODE_BYTES, (out + code_bytes).to(tl.pointer_type(tl.int16)) + first
    left = numel - first * BLOCK
    if left >= BLOCKS * BLOCK:
        _encode_blocks(source, codes, scales, 0, 0, 0, KIND, SHARE, NARROW, BLOCKS, BLOCK, True)
    else:
        lefts = left.to(tl.int32), (code_bytes - first * CODE_BYTES).to(tl.int32), (num_scales - first).to(tl.int32)
        _encode_blocks(source, codes, scales, *lefts, KIND, SHARE, NARROW, BLOCKS, BLOCK, False)


@triton.jit
def _decoded(
    codes,
    scales,
    left,
    KIND: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Return the values of blocks of a row, with zeros behind its end. Values of int4 are pairs in a last dimension."""
    block = tl.arange(0, BLOCKS)
    size: tl.constexpr = BLOCK // 2 if KIND == "int4" else BLOCK
    at = block[:, None] * size + tl.arange(0, size)[None, :]
    if WHOLE:
        code, upper = tl.load(codes + at), tl.load(scales + block)
    else:
        there = at * (BLOCK // size) < left
        code = tl.load(codes + at, mask=there, other=0)
        upper = tl.load(scales + block, mask=block * BLOCK < left, other=0)
    scale = (upper.to(tl.int32) << 16).to(tl.float32, bitcast=True)[:, None]
    if KIND == "int4":
        pair = code.to(tl.int32)
        values = tl.join(_from_integer(pair & 15, 8) * scale, _from_integer(pair >> 4, 8) * scale)
    elif KIND == "fp8":
        values = _from_e4m3(code, NARROW) * scale
    else:
        values = _from_integer(code.to(tl.int32), 0x80) * scale
    return values


@triton.jit
def _decode_blocks(
    codes,
    scales,
    out,
    left,
    num_messages,
    message_stride,
    factor,
    KIND: tl.constexpr,
    SUM: tl.constexpr,
    FEW: tl.constexpr,
    ADD: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    values = _decoded(codes, scales, left, KIND, NARROW, BLOCKS, BLOCK, WHOLE)
    at = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if SUM:
        if FEW > 0:
            for _ in tl.static_range(1, FEW):
                codes += message_stride
                scales += message_stride // 2
                values += _decoded(codes, scales, left, KIND, NARROW, BLOCKS, BLOCK, WHOLE)
        else:
            for _ in range(1, num_messages):
                codes += message_stride
                scales += message_stride // 2
                values += _decoded(codes, scales, left, KIND, NARROW, BLOCKS, BLOCK, WHOLE)
        values *= factor
    values = tl.reshape(values, (BLOCKS, BLOCK))
    if ADD:
        if WHOLE:
            values = tl.load(out + at) + values
        else:
            values = tl.load(out + at, mask=at < left, other=0.0) + values
    if WHOLE:
        tl.store(out + at, values.to(out.dtype.element_ty))
    else:
        tl.store(out + at, values.to(out.dtype.element_ty), mask=at < left)


@triton.jit
def _decode(
    data,
    out,
    numel,
    code_bytes,
    inner,
    num_groups,
    data_outer,
    data_inner,
    out_outer,
    out_inner,
    num_messages,
    message_stride,
    factor,
    KIND: tl.constexpr,
    SUM: tl.constexpr,
    FEW: tl.constexpr,
    ADD: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE_BYTES: tl.constexpr,
):
    i, j, first = _place(inner, num_groups, BLOCKS)
    out += i * out_outer + j * out_inner + first * BLOCK
    data += i * data_outer + j * data_inner
    codes, scales = data + first * CODE_BYTES, (data + code_bytes).to(tl.pointer_type(tl.int16)) + first
    left = numel - first * BLOCK
    sums = num_messages, message_stride, factor
    if left >= BLOCKS * BLOCK:
        _decode_blocks(codes, scales, out, 0, *sums, KIND, SUM, FEW, ADD, NARROW, BLOCKS, BLOCK, True)
    else:
        last = left.to(tl.int32)
        _decode_blocks(codes, scales, out, last, *sums, KIND, SUM, FEW, ADD, NARROW, BLOCKS, BLOCK, False)


def encode(kind: Kind, source: Tensor, out: Tensor) -> None:
    for rows in rows_of(source.detach(), out):
        outer, inner, numel = rows.values.shape
        num_groups = triton.cdiv(num_blocks(numel), _BLOCKS)
        _encode[(outer * inner * num_groups,)](
            rows.values,
            rows.data,
            numel,
            num_code_bytes(kind, numel),
            num_scale_bytes(numel) // 2,
            inner,
            num_groups,
            *rows.values.stride()[:2],
            *rows.data.stride()[:2],
            SHARE=SHARE[kind],
            num_warps=_ENCODING_WARPS,
            **_choices(kind, out.device),
        )


def decode(kind: Kind, data: Tensor, out: Tensor) -> None:
    _launch_decode(kind, data[None], out, 1.0, is_sum=False, add=False)


def decode_sum(kind: Kind, data: Tensor, out: Tensor, factor: float, add: bool) -> None:
    _launch_decode(kind, data, out, factor, is_sum=True, add=add)


def _launch_decode(kind: Kind, data: Tensor, out: Tensor, factor: float, *, is_sum: bool, add: bool) -> None:
    num_messages = data.shape[0]
    for rows in rows_of(out.detach(), data[0]):
        outer, inner, numel = rows.values.shape
        num_groups = triton.cdiv(num_blocks(numel), _BLOCKS)
        _decode[(outer * inner * num_groups,)](
            rows.data,
            rows.values,
            numel,
            num_code_bytes(kind, numel),
            inner,
            num_groups,
            *rows.data.stride()[:2],
            *rows.values.stride()[:2],
            num_messages,
            data.stride(0),
            factor,
            SUM=is_sum,
            FEW=num_messages if is_sum and num_messages <= _FEW else 0,
            ADD=add,
            num_warps=_DECODING_WARPS,
            **_choices(kind, out.device),
        )


def _choices(kind: Kind, device: torch.device) -> dict[str, object]:
    """Return the constants that kernels are compiled for."""
    return {
        "KIND": kind,
        "NARROW": kind == "fp8" and torch.cuda.get_device_capability(device) >= _NARROW_CONVERSIONS,
        "BLOCKS": _BLOCKS,
        "BLOCK": BLOCK,
        "CODE_BYTES": BLOCK // 2 if kind == "int4" else BLOCK,
        "enable_fp_fusion": False,
    }
