"""One of Adam's moments in 8 bits, which is read and written like an fp32 tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwell.kernels import moments8
from shardwell.kernels.update_args import BLOCK

_CHUNK = 2**18  # elements at a time, a multiple of BLOCK, so that temporaries stay small


@dataclass(frozen=True, eq=False)
class Moment8bit:
    """The codes of a 1-D slice, and an exponent for each block of them."""

    codes: Tensor
    exponents: Tensor
    is_second: bool

    dtype = torch.float32
    ndim = 1

    @classmethod
    def zeros(cls, numel: int, *, is_second: bool, device: torch.device | str = "cpu") -> Moment8bit:
        blocks = cls.num_blocks(numel)
        codes, exponents = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (numel, blocks))
        return cls(codes, exponents, is_second)

    @classmethod
    def zeros_like(cls, values: Tensor, *, is_second: bool) -> Moment8bit:
        """Return zeros for as many values, in memory of the same kind: a simulation tells kinds by tensors alone."""
        codes = values.new_zeros(values.numel(), dtype=torch.uint8)
        return cls(codes, values.new_zeros(cls.num_blocks(values.numel()), dtype=torch.uint8), is_second)

    @staticmethod
    def num_blocks(numel: int) -> int:
        return -(-numel // BLOCK)

    @classmethod
    def of(cls, values: Tensor, *, is_second: bool) -> Moment8bit:
        """Return the moment with these values."""
        return cls.zeros(values.numel(), is_second=is_second).copy_(values)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + self.exponents.numel()

    def numel(self) -> int:
        return self.codes.numel()

    def __getitem__(self, span: slice) -> Tensor:
        """Return the values, in new memory."""
        start, stop, _ = span.indices(self.numel())
        first = start // BLOCK * BLOCK
        decode = moments8.decode_second if self.is_second else moments8.decode_first
        parts = [decode(self.codes, self.exponents, part) for part in _chunks(first, stop)]
        return torch.cat(parts)[start - first :] if parts else torch.empty(0, device="cpu")

    def parts(self, span: slice) -> tuple[Tensor, Tensor]:
        """Return views of the codes and exponents of a span that begins at a block."""
        start, stop, _ = span.indices(self.numel())
        return self.codes[start:stop], self.exponents[start // BLOCK : -(-stop // BLOCK)]

    def copy_(self, values: Tensor) -> Moment8bit:
        """Set the values. Values without a code are rounded, up or down at random; values of codes stay the same."""
        encode = moments8.encode_second if self.is_second else moments8.encode_first
        for part in _chunks(0, self.numel()):
            wide = values[part].float()
            encode(self.codes, self.exponents, part, wide, 0)
            self._raise_exponents(part, wide)
        return self

    def _raise_exponents(self, span: slice, values: Tensor) -> None:
        """Use the next exponent in blocks whose values it represents exactly and the present one does not.

        If the greatest value of a block was rounded down when it became a code, the exponent cannot be derived from the
        values any more. With the next exponent, values that were codes are codes again.
        """
        wrong = _in_blocks(self[span] != values)
        if not bool(wrong.any()):
            return
        before, exponents = self.parts(span)
        other = Moment8bit.zeros(values.numel(), is_second=self.is_second)
        encode = moments8.encode_second if self.is_second else moments8.encode_first
        above = (exponents.int() + 1).clamp(max=254).to(torch.uint8)
        encode(other.codes, other.exponents, slice(0, values.numel()), values, 0, above)
        better = wrong & ~_in_blocks(other[:] != values)
        exponents[better] = above[better]
        each = better.repeat_interleave(BLOCK)[: values.numel()]
        before[each] = other.codes[each]

    def copy_range(self, first: int, numel: int) -> Moment8bit:
        """Return a slice, in new memory."""
        return Moment8bit.of(self[first : first + numel], is_second=self.is_second)

    def clone(self) -> Moment8bit:
        return Moment8bit(self.codes.clone(), self.exponents.clone(), self.is_second)

    def detach(self) -> Moment8bit:
        """Return another object on the same memory."""
        return Moment8bit(self.codes.detach(), self.exponents.detach(), self.is_second)

    def empty_like(self) -> Moment8bit:
        return Moment8bit(torch.empty_like(self.codes), torch.empty_like(self.exponents), self.is_second)

    def exchange(self, other: Moment8bit) -> None:
        """Swap the memory of two moments."""
        for mine, its in ((self.codes, other.codes), (self.exponents, other.exponents)):
            before, mine.data = mine.data, its.data
            its.data = before


def _in_blocks(flags: Tensor) -> Tensor:
    """Return for each block whether one of its flags is true."""
    return torch.nn.functional.pad(flags, (0, -flags.numel() % BLOCK)).view(-1, BLOCK).any(dim=1)


def _chunks(first: int, stop: int) -> Iterator[slice]:
    for start in range(first, stop, _CHUNK):
        yield slice(start, min(start + _CHUNK, stop))
