"""Block-wise quantisation for communication and storage: values in a quarter or an eighth of the bytes.

Each block of 256 elements has a scale: its greatest magnitude over the largest code (127, 7 or 448), rounded up to
bf16. An element is stored as the nearest code, ties to even, of itself times the inverse of the scale, and read as code
* scale. The scale marks the blocks where this is not possible:

    a block of zeros, or of numbers so small that its scale would be below 2^-116     scale 0, all zeros
    a block with a NaN or an infinity                                                 scale NaN, all NaN

The C++ kernels for host memory, the Triton kernels for CUDA and the torch reference give the same bits for any number
of threads; a NaN is a NaN. The module works on tensors and devices and does not depend on ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, get_args

import torch
from torch import Tensor

from shardwell import kernels, virtual_time
from shardwell.errors import ShardwellError
from shardwell.kernels import quantize_host, quantize_reference
from shardwell.kernels.quantized_format import (
    BLOCK,
    VALUES,
    Kind,
    check,
    check_alignment,
    num_code_bytes,
    num_scale_bytes,
)

__all__ = ["BLOCK", "Codec", "Kind"]


class CodecKernels(Protocol):
    """The functions that each implementation has. Their tensors were checked and are not empty."""

    def encode(self, kind: Kind, source: Tensor, out: Tensor) -> None: ...

    def decode(self, kind: Kind, data: Tensor, out: Tensor) -> None: ...

    def decode_sum(self, kind: Kind, data: Tensor, out: Tensor, factor: float, add: bool) -> None: ...


@dataclass(frozen=True)
class Codec:
    """A quantised format: "int8", "int4" or "fp8" (e4m3)."""

    kind: Kind

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ShardwellError(f"codec: found '{self.kind}', expected one of {', '.join(get_args(Kind))}")

    @staticmethod
    def takes(dtype: torch.dtype) -> bool:
        """Return whether values of that dtype can be quantised."""
        return dtype in VALUES

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of a quantised row of that many elements, a multiple of 16."""
        return num_code_bytes(self.kind, numel) + num_scale_bytes(numel)

    def encode(self, source: Tensor, out: Tensor) -> None:
        """Quantise rows: (..., m) of fp32, bf16 or fp16 into contiguous (..., num_bytes(m)) of bytes.

        The dimensions before the last may have any strides: a transposed view is quantised and reordered in one pass.
        """
        self._check("source", source, "out", out, out.device)
        if not out.is_contiguous():
            raise ShardwellError(f"out: found strides {list(out.stride())}, expected contiguous memory")
        if out.is_meta:
            virtual_time.touch(source, out)
        elif out.numel() > 0:
            _kernels(self.kind, out.device).encode(self.kind, source, out)

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Dequantise rows: (..., num_bytes(m)) of bytes into (..., m) of fp32, bf16 or fp16.

        Values are rounded to bf16 and fp16 like in torch.
        """
        self._check("out", out, "data", data, data.device)
        if out.is_meta:
            virtual_time.touch(data, out)
        elif out.numel() > 0:
            _kernels(self.kind, out.device).decode(self.kind, data, out)

    def decode_sum(self, data: Tensor, out: Tensor, factor: float = 1.0, *, add: bool = False) -> None:
        """Write, or add, `factor` times the sum of k messages: (k, ..., num_bytes(m)) of bytes into (..., m) of fp32.

        Messages are added in their order, in fp32.
        """
        if data.ndim < 2 or data.shape[0] == 0:
            raise ShardwellError(f"data: found shape {list(data.shape)}, expected one message or more of whole rows")
        self._check("out", out, "data", data[0], data.device, torch.float32)
        check_alignment("data", data)
        if out.is_meta:
            virtual_time.touch(data, out)
        elif out.numel() > 0:
            _kernels(self.kind, out.device).decode_sum(self.kind, data, out, factor, add)

    def error_bound(self, source: Tensor) -> Tensor:
        """Return how far the dequantised fp32 value may be from each element: fp32, in the shape of the source.

            int8, int4    scale * (1/2 + 2^-16)
            fp8           |x| / 16 + scale / 1024
            scale 0       |x|

        The bound is NaN in a block with a NaN or an infinity, and does not hold in a block that exceeds 2^127: the
        dequantised value may be an infinity there.
        """
        return quantize_reference.error_bound(self.kind, source)

    def _check(
        self,
        values_name: str,
        values: Tensor,
        data_name: str,
        data: Tensor,
        device: torch.device,
        *dtypes: torch.dtype,
    ) -> None:
        if values.ndim == 0:
            raise ShardwellError(f"{values_name}: found a tensor without dimensions, expected rows: (..., elements)")
        check(values_name, values, tuple(values.shape), device, *(dtypes or VALUES))
        shape = (*values.shape[:-1], self.num_bytes(values.shape[-1]))
        check(data_name, data, shape, device, torch.uint8)
        check_alignment(data_name, data)


def _kernels(kind: Kind, device: torch.device) -> CodecKernels:
    """Return the kernels of a device; the torch reference for a kind that has none there."""
    if device.type == "cuda":
        from shardwell.kernels import quantize_triton

        return quantize_triton if kind in quantize_triton.KINDS else quantize_reference
    if device.type == "cpu" and kind in quantize_host.KINDS and kernels.compiled() is not None:
        return quantize_host
    return quantize_reference
