"""The format of a quantised row, and how rows are laid out in tensors: arithmetic for all implementations.

A row of m elements becomes its codes, then one scale for each block, both padded with zeros to a multiple of 16 bytes:

    codes     m bytes (int8, fp8) or m / 2 (int4: the first of two elements in the low four bits)
    scales    bf16, little endian, one for each block of 256 elements; the last block may be shorter

Rows of codes begin at multiples of 16 bytes in memory too, so that a GPU moves 16 bytes at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardwell.errors import ShardwellError

Kind = Literal["int8", "int4", "fp8"]

BLOCK = 256  # elements that share a scale
ALIGNMENT = 16  # bytes
# 1 / the largest code (127, 7, 448), in fp32 and rounded down: values that codes can represent exactly get that scale.
SHARE: dict[Kind, float] = {"int8": 0x1020408 * 2.0**-31, "int4": 0x1249248 * 2.0**-27, "fp8": 0x1249248 * 2.0**-33}
# Elements that share bytes, and the number of these bytes.
PACKING: dict[Kind, tuple[int, int]] = {"int8": (1, 1), "int4": (2, 1), "fp8": (1, 1)}
LEAST_SCALE = 2.0**-116  # of a block that is not stored as zeros: below it, subnormal numbers would matter
VALUES = (torch.float32, torch.bfloat16, torch.float16)


def num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def num_code_bytes(kind: Kind, numel: int) -> int:
    """Return the bytes of a row's codes, with padding."""
    return _padded(packed_bytes(kind, numel))


def packed_bytes(kind: Kind, numel: int) -> int:
    """Return the bytes of a row's codes, without padding."""
    elements, num_bytes = PACKING[kind]
    return -(-numel // elements) * num_bytes


def num_scale_bytes(numel: int) -> int:
    """Return the bytes of a row's scales, with padding."""
    return _padded(2 * num_blocks(numel))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class RowView:
    """The rows that a kernel iterates over: values and quantised data along two dimensions."""

    values: Tensor  # outer, inner, elements
    data: Tensor  # outer, inner, bytes; of the first message if there are several

    @property
    def numel(self) -> int:
        return self.values.shape[2]


def rows_of(values: Tensor, data: Tensor) -> Iterator[RowView]:
    """Yield all rows of two tensors with the same leading dimensions; contiguous dimensions are merged."""
    merged: list[list[int]] = []  # size, and stride in each tensor
    for size, *strides in zip(values.shape[:-1], values.stride()[:-1], data.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == [size * stride for stride in strides]:
            merged[-1] = [merged[-1][0] * size, *strides]
        else:
            merged.append([size, *strides])
    merged = [[1, 0, 0]] * (2 - len(merged)) + merged
    sizes = [one[0] for one in merged]
    pair = [
        tensor.as_strided([*sizes, tensor.shape[-1]], [*(one[place] for one in merged), 1])
        for place, tensor in enumerate((values, data), 1)
    ]
    for index in itertools.product(*map(range, sizes[:-2])):
        yield RowView(pair[0][index], pair[1][index])


def check(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device, *dtypes: torch.dtype) -> None:
    """Raise if a kernel cannot take the tensor."""
    expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if tensor.dtype not in dtypes:
        raise ShardwellError(f"{name}: found {str(tensor.dtype).removeprefix('torch.')}, expected {expected}")
    if tensor.device != device:
        raise ShardwellError(f"{name}: found a tensor on {tensor.device}, expected one on {device}, as the other is")
    if tuple(tensor.shape) != shape:
        raise ShardwellError(f"{name}: found shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.layout is not torch.strided or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        raise ShardwellError(
            f"{name}: found rows with gaps between their elements (strides {list(tensor.stride())}), expected rows in "
            "one piece: pass a contiguous copy"
        )


def check_alignment(name: str, data: Tensor) -> None:
    """Raise if rows of codes do not begin at multiples of 16 bytes."""
    if data.is_meta or data.numel() == 0:
        return
    steps = [stride for size, stride in zip(data.shape[:-1], data.stride()[:-1], strict=True) if size > 1]
    if data.data_ptr() % ALIGNMENT or any(stride % ALIGNMENT for stride in steps):
        raise ShardwellError(
            f"{name}: found rows at address {data.data_ptr() % ALIGNMENT} modulo {ALIGNMENT} with strides "
            f"{list(data.stride())}, expected rows that begin at multiples of {ALIGNMENT} bytes: pass a copy"
        )
