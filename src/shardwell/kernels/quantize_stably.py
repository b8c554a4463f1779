"""Quantised storage: the fp32 values that the codes represent are the values of the parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwell.kernels.quantize import Codec
from shardwell.kernels.quantized_format import BLOCK

_ROUNDS = 3  # of quantising again what was dequantised, after which all scales are stable


@torch.no_grad()
def quantize_stably(codec: Codec, values: Tensor, codes: Tensor) -> None:
    """Quantise fp32 values (1D) so that the dequantised fp32 values give the same codes again.

    A codec rounds scales up, so the greatest value of a block may get less than the largest code, and its dequantised
    value a smaller scale. Such a block gets the smaller scale immediately. Values beyond its range are clamped, by no
    more than the error bound of the codec.
    """
    seen = torch.empty_like(values)
    codec.encode(values, codes)
    for _ in range(_ROUNDS):
        codec.decode(codes, seen)
        codec.encode(seen, codes)
    codec.decode(codes, seen)
    even = values.numel() - values.numel() % BLOCK
    for part, ends in ((values[:even], seen[:even]), (values[even:], seen[even:])):
        if part.numel():
            rows = ends.view(-1, min(BLOCK, part.numel()))
            most = rows.abs().amax(-1, keepdim=True)
            torch.clamp(part.view_as(rows), -most, most, out=rows)
    codec.encode(seen, codes)
