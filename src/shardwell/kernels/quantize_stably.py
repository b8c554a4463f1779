"""Numbers that rest in codes: the codes stand for fp32 numbers, and those are the truth."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwell.kernels.quantize import Codec
from shardwell.kernels.quantized_format import BLOCK

_ROUNDS = 3  # of encoding what was decoded, after which all scales stay as they are


@torch.no_grad()
def quantize_stably(codec: Codec, values: Tensor, codes: Tensor) -> None:
    """Encode fp32 numbers (1D) so that what is decoded to fp32 gives the same codes again.

    A codec rounds scales up, so the greatest number of a block may get less than the largest code, and what is decoded
    of it a smaller scale. Such a block has the smaller one at once. What is beyond its end is cut off there: by no more
    than the codec says that it is off.
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
