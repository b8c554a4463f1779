"""Numbers for codecs, rows that lie in memory in several ways, and what is compared."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from shardwell.kernels.quantized_format import Kind
from tests.support.kernel_cases import any_bits, bits, likely

KINDS: tuple[Kind, ...] = get_args(Kind)
LARGEST: dict[Kind, float] = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}  # codes
TYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 2, 3, 255, 256, 257, 511, 1000)


def huge(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Near the greatest numbers of the type, but finite."""
    return (torch.finfo(dtype).max * (1 - torch.rand(numel, generator=_generator(seed)) / 4)).to(dtype)


def tiny(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Blocks whose scale is around the least one, down to subnormal numbers."""
    greatest = torch.randint(-122, -104, (-(-numel // 256),), generator=_generator(seed)).repeat_interleave(256)
    exponents = greatest[:numel] - torch.randint(30, (numel,), generator=_generator(seed + 1))
    return (torch.randn(numel, generator=_generator(seed + 2)).double() * 2.0**exponents).to(dtype)


def levels(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Whole and half steps of all codecs: ties, and the least and greatest codes."""
    steps = torch.tensor([0.5, 1, 1.5, 2.5, 3.5, 6.5, 7, 127, 126.5, 2**-9, 2**-10, 3 * 2**-10, 17 / 16, 19 / 16, 448])
    chosen = steps[torch.randint(len(steps), (numel,), generator=_generator(seed))]
    values = chosen * (1 - 2.0 * torch.randint(2, (numel,), generator=_generator(seed + 1)))
    values[::256] = float(steps[seed % len(steps)])
    return values.to(dtype)


def zeros(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Of both signs."""
    return torch.zeros(numel, dtype=dtype) * torch.randn(numel, generator=_generator(seed)).sign().to(dtype)


MAKERS = {
    "any bits": any_bits,
    "likely": likely,
    "huge": huge,
    "tiny": tiny,
    "levels": levels,
    "zeros": zeros,
}


def laid_out(values: Tensor, leading: tuple[int, ...], way: str) -> Tensor:
    """Rows of these values, in one piece, with gaps between the rows, or with the first dimensions swapped."""
    rows = values.view(*leading, -1)
    if way == "gaps":
        room = torch.full((*leading, rows.shape[-1] + 3), torch.nan, dtype=values.dtype)
        return room[..., 1 : rows.shape[-1] + 1].copy_(rows)
    return rows.transpose(0, len(leading) - 1) if way == "swapped" else rows


def same(first: Tensor, second: Tensor) -> bool:
    """In every bit. Two NaN are the same."""
    return bool(((bits(first) == bits(second)) | (first.isnan() & second.isnan())).all())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
