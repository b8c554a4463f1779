"""The codecs as Triton kernels: a program takes a few blocks of a row.

They work on bits where a device or a compiler might round in another way: codes of fp8 are made and read as integers,
divisions are IEEE's, and no product and sum become one operation. Where the rows of a tensor lie is said by strides of
two dimensions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardwell.codec.form import BLOCK, LARGEST, Kind, Rows, num_blocks, num_code_bytes, rows_of

_BLOCKS = 8  # that a program takes at most
_WARPS = 4


@triton.jit
def _place(inner, num_groups, BLOCKS: tl.constexpr):
    """The outer and inner number of the row, and the blocks in it."""
    program = tl.program_id(0).to(tl.int64)
    row = program // num_groups
    return row // inner, row % inner, (program % num_groups) * BLOCKS + tl.arange(0, BLOCKS)


@triton.jit
def _scale_bits(values, LARGEST: tl.constexpr):
    greatest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    amax = greatest.to(tl.float32, bitcast=True)
    quotient = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
    upper = (quotient.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    upper = tl.where(upper < 0x0580, 0, upper)  # 2^-116
    return tl.where(greatest >= 0x7F800000, 0x7FC0, upper)


@triton.jit
def _scaled(values, upper):
    usable = (upper > 0) & (upper < 0x7F80)
    scale = (tl.where(usable, upper, 0x3F80) << 16).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.where(usable[:, None], values * inverse[:, None], 0.0)


@triton.jit
def _to_e4m3(values):
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
def _from_e4m3(codes):
    magnitude = codes & 0x7F
    subnormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    normal = tl.where(magnitude == 0x7F, 0x7FC00000, (magnitude << 20) + 0x3C000000)
    bits = tl.where(magnitude < 8, subnormal, normal)
    return tl.where(codes < 0x80, bits, bits | -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def _decoded(data, blocks, numel, code_bytes, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers of blocks of a row."""
    exists = blocks * BLOCK < numel
    scales = data + code_bytes + 2 * blocks
    low = tl.load(scales, mask=exists, other=0).to(tl.int32)
    high = tl.load(scales + 1, mask=exists, other=0).to(tl.int32)
    scale = ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < numel
    if KIND == "int4":
        codes = tl.load(data + at // 2, mask=inside, other=0).to(tl.int32) >> ((at & 1) * 4).to(tl.int32)
        values = (((codes & 15) ^ 8) - 8).to(tl.float32)
    else:
        codes = tl.load(data + at, mask=inside, other=0).to(tl.int32)
        if KIND == "fp8":
            values = _from_e4m3(codes)
        else:
            values = ((codes ^ 0x80) - 0x80).to(tl.float32)
    return values * scale[:, None]


@triton.jit
def _encode(
    source,
    out,
    numel,
    code_bytes,
    inner,
    num_groups,
    source_outer,
    source_inner,
    out_outer,
    out_inner,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i, j, blocks = _place(inner, num_groups, BLOCKS)
    source += i * source_outer + j * source_inner
    out += i * out_outer + j * out_inner
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(source + at, mask=at < numel, other=0.0).to(tl.float32)
    upper = _scale_bits(values, LARGEST)
    scaled = _scaled(values, upper)
    if KIND == "int4":
        low, high = tl.split(tl.reshape(_to_integer(scaled), (BLOCKS, BLOCK // 2, 2)))
        codes = (low & 15) | ((high & 15) << 4)
        to = blocks[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    else:
        if KIND == "fp8":
            codes = _to_e4m3(scaled)
        else:
            codes = _to_integer(scaled) & 0xFF
        to = at
    tl.store(out + to, codes.to(tl.uint8), mask=to < code_bytes)
    exists = blocks * BLOCK < numel
    tl.store(out + code_bytes + 2 * blocks, (upper & 0xFF).to(tl.uint8), mask=exists)
    tl.store(out + code_bytes + 2 * blocks + 1, (upper >> 8).to(tl.uint8), mask=exists)


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
    ADD: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i, j, blocks = _place(inner, num_groups, BLOCKS)
    data += i * data_outer + j * data_inner
    out += i * out_outer + j * out_inner
    values = _decoded(data, blocks, numel, code_bytes, KIND, BLOCK)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if SUM:
        for _ in range(1, num_messages):
            data += message_stride
            values += _decoded(data, blocks, numel, code_bytes, KIND, BLOCK)
        values *= factor
        if ADD:
            values = tl.load(out + at, mask=at < numel, other=0.0) + values
    tl.store(out + at, values.to(out.dtype.element_ty), mask=at < numel)


def encode(kind: Kind, source: Tensor, out: Tensor) -> None:
    for rows in rows_of(source.detach(), out):
        blocks, num_groups = _groups(rows)
        _encode[_grid(rows, num_groups)](
            rows.values,
            rows.data,
            rows.numel,
            num_code_bytes(kind, rows.numel),
            rows.values.shape[1],
            num_groups,
            *rows.values.stride()[:2],
            *rows.data.stride()[:2],
            KIND=kind,
            LARGEST=LARGEST[kind],
            BLOCKS=blocks,
            BLOCK=BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )


def decode(kind: Kind, data: Tensor, out: Tensor) -> None:
    _launch_decode(kind, data[None], out, 1.0, is_sum=False, add=False)


def decode_sum(kind: Kind, data: Tensor, out: Tensor, factor: float, add: bool) -> None:
    _launch_decode(kind, data, out, factor, is_sum=True, add=add)


def _launch_decode(kind: Kind, data: Tensor, out: Tensor, factor: float, *, is_sum: bool, add: bool) -> None:
    for rows in rows_of(out.detach(), data[0]):
        blocks, num_groups = _groups(rows)
        _decode[_grid(rows, num_groups)](
            rows.data,
            rows.values,
            rows.numel,
            num_code_bytes(kind, rows.numel),
            rows.values.shape[1],
            num_groups,
            *rows.data.stride()[:2],
            *rows.values.stride()[:2],
            data.shape[0],
            data.stride(0),
            factor,
            KIND=kind,
            SUM=is_sum,
            ADD=add,
            BLOCKS=blocks,
            BLOCK=BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )


def _groups(rows: Rows) -> tuple[int, int]:
    """How many blocks of a row a program takes, and how many programs that makes for a row."""
    blocks = min(_BLOCKS, triton.next_power_of_2(num_blocks(rows.numel)))
    return blocks, triton.cdiv(num_blocks(rows.numel), blocks)


def _grid(rows: Rows, num_groups: int) -> tuple[int]:
    outer, inner, _ = rows.values.shape
    return (outer * inner * num_groups,)
