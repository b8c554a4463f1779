"""The kernels as torch operations: the reference for the library, and the fallback without it.

They consist of single additions, subtractions, multiplications and divisions, each rounded to fp32 on its own, and of
fused multiply-adds that are rounded once, in the places where torch has them on CUDA. torch's own fused forms (`add`
with `alpha`, `lerp`, `addcmul`, `addcdiv`) differ from machine to machine. Square roots are computed in double: torch's
own in fp32 are off by one bit in 0.6 % of cases where MKL computes them.

The library gives the same bits, except for the payload of a NaN.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from shardwell.kernels import moments8, rounding
from shardwell.kernels.file_read import FileRead
from shardwell.kernels.rules import (
    LIKES,
    AdagradCoefficients,
    AdagradRule,
    AdamCoefficients,
    AdamRule,
    LionCoefficients,
    LionRule,
    Rule,
    SgdCoefficients,
    SgdRule,
)
from shardwell.kernels.update_args import Moments8bitArgs, OutOfPlaceState, SplitMaster, UpdateArgs

_CHUNK = 2**18  # elements at a time, a multiple of the block of 8-bit moments, so that temporaries stay small
_READ = 2**19  # bytes of one read from a file
_BELOW_MIDDLE = 2**28 - 1  # bits of a double that are 0 in the middle of two fp32 numbers


class Reference:
    """The backend that is always available."""

    isa = "torch"

    @torch.no_grad()
    def update(self, rule: Rule, args: UpdateArgs, threads: int) -> None:
        if args.new is not None:
            _copy(args.master, args.state, args.new)
            args = replace(args, master=args.new.master, state=args.new.state, new=None)
        for span in _chunks(args.numel):
            _update(rule, args, span)

    @torch.no_grad()
    def add(self, total: Tensor, gradient: Tensor, factor: float, fresh: bool, threads: int) -> None:
        for span in _chunks(total.numel()):
            scaled = gradient[span].float() * factor
            total[span] = scaled if fresh else total[span] + scaled

    def sum_of_squares(self, data: Tensor, threads: int) -> float:
        return sum(float(data[span].double().square().sum()) for span in _chunks(data.numel()))

    def to_bf16(self, source: Tensor, out: Tensor, threads: int) -> None:
        rounding.to_bf16(source, out)

    def crc32(self, data: bytes | bytearray | memoryview, value: int) -> int:
        return zlib.crc32(data, value)

    def crc32_blocks(self, data: bytes | bytearray | memoryview, block: int, value: int) -> tuple[int, bytes]:
        view = memoryview(data).cast("B")
        sums = bytearray()
        for start in range(0, len(view), block):
            part = view[start : start + block]
            one = zlib.crc32(part)
            value = self.crc32_combine(value, one, len(part))
            sums += one.to_bytes(4, "big")
        return value, bytes(sums)

    def read_blocks(self, read: FileRead) -> bytes:
        unwanted = memoryview(bytearray(read.before + read.after))
        offset, sums, value, left = read.offset, bytearray(), read.value, read.block
        for place in (unwanted[: read.before], read.data, unwanted[read.before :]):
            rest = place
            while rest:
                found = os.preadv(read.file, [rest[:_READ]], offset)
                if not found:
                    raise EOFError
                part, rest, offset = rest[:found], rest[found:], offset + found
                while part:
                    value, taken = zlib.crc32(part[:left], value), min(left, len(part))
                    part, left = part[taken:], left - taken
                    if not left:
                        sums += value.to_bytes(4, "big")
                        value, left = 0, read.block
        return bytes(sums + value.to_bytes(4, "big") if left < read.block else sums)

    def crc32_combine(self, first: int, second: int, num_bytes: int) -> int:
        return _product(first, _power_of_bytes(num_bytes)) ^ second


def _chunks(numel: int) -> Iterator[slice]:
    for start in range(0, numel, _CHUNK):
        yield slice(start, min(start + _CHUNK, numel))


def _copy(master: Tensor | SplitMaster, state: tuple[Tensor, ...] | Moments8bitArgs, new: OutOfPlaceState) -> None:
    for old, copy in zip(_tensors(master, state), _tensors(*new), strict=True):
        copy.copy_(old)


def _tensors(master: Tensor | SplitMaster, state: tuple[Tensor, ...] | Moments8bitArgs) -> list[Tensor]:
    return [
        *(master if isinstance(master, SplitMaster) else (master,)),
        *((*state.codes, *state.exponents) if isinstance(state, Moments8bitArgs) else state),
    ]


def _update(rule: Rule, args: UpdateArgs, span: slice) -> None:
    gradient = args.gradient[span].float() * args.factor
    halves = args.master
    if isinstance(halves, SplitMaster):
        master = rounding.join(halves.high[span], halves.low[span], torch.empty_like(gradient))
    else:
        master = halves[span]
    if isinstance(args.state, Moments8bitArgs):
        assert isinstance(rule, AdamRule)
        first, second = moments8.decode(args.state, span)
        _adam(rule.numbers(), master, gradient, first, second)
        moments8.encode(args.state, span, first, second, args.seed)
    else:
        _apply(rule, master, gradient, [state[span] for state in args.state])
    if isinstance(halves, SplitMaster):
        rounding.split(master, halves.high[span], halves.low[span])
    if args.out is not None:
        rounding.narrow(master, args.out[span])


def _apply(rule: Rule, master: Tensor, gradient: Tensor, state: list[Tensor]) -> None:
    match rule:
        case AdamRule():
            _adam(rule.numbers(), master, gradient, *state)
        case SgdRule():
            _sgd(rule.numbers(), master, gradient, *state)
        case AdagradRule():
            _adagrad(rule.numbers(), master, gradient, *state)
        case LionRule():
            _lion(rule.numbers(), master, gradient, *state)


def _adam(numbers: AdamCoefficients, master: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> None:
    gradient = _coupled(gradient, master, numbers.coupled)
    squares = gradient * gradient
    match LIKES[numbers.like]:
        case "cuda":
            first.copy_(_lerp(first, gradient, numbers.weight1))
            second.copy_(_fma(squares, numbers.weight2, second * numbers.beta2))
            master.mul_(numbers.decay)
        case "cuda_fused":
            first.copy_(_fma(first, numbers.beta1, _fma(gradient, -numbers.beta1, gradient)))
            second.copy_(_fma(second, numbers.beta2, _fma(squares, -numbers.beta2, squares)))
            master.copy_(_fma(master, numbers.decay, master))
        case "cpu":
            first.copy_(_lerp(first, gradient, numbers.weight1))
            second.copy_(_fma(gradient * numbers.weight2, gradient, second * numbers.beta2))
            master.mul_(numbers.decay)
    denominator = _root(second) / numbers.root + numbers.eps
    if LIKES[numbers.like] == "cuda":
        master.copy_(_fma(first / denominator, numbers.step_size, master))
    else:
        master.add_(first * numbers.step_size / denominator)


def _sgd(numbers: SgdCoefficients, master: Tensor, gradient: Tensor, momentum: Tensor | None = None) -> None:
    gradient = _coupled(gradient, master, numbers.coupled)
    if momentum is not None:
        momentum.copy_(gradient if numbers.first else _fma(gradient, numbers.weight, momentum * numbers.momentum))
        gradient = _fma(momentum, numbers.momentum, gradient) if numbers.nesterov else momentum
    master.copy_(_fma(gradient, numbers.rate, master))


def _adagrad(numbers: AdagradCoefficients, master: Tensor, gradient: Tensor, total: Tensor) -> None:
    gradient = _coupled(gradient, master, numbers.coupled)
    total.copy_(_fma(gradient, gradient, total))
    master.add_(gradient * numbers.rate / (_root(total) + numbers.eps))


def _lion(numbers: LionCoefficients, master: Tensor, gradient: Tensor, momentum: Tensor) -> None:
    direction = _lerp(momentum, gradient, numbers.weight1).sign()
    master.mul_(numbers.decay).add_(direction * numbers.rate)
    momentum.copy_(_lerp(momentum, gradient, numbers.weight2))


def _coupled(gradient: Tensor, master: Tensor, weight: float) -> Tensor:
    return _fma(master, weight, gradient) if weight else gradient


def _lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Interpolate from the nearer end, like torch."""
    difference = end - start
    return _fma(difference, weight, start) if weight < 0.5 else _fma(difference, weight - 1, end)


def _fma(first: Tensor, second: Tensor | float, third: Tensor) -> Tensor:
    """Return the product plus `third`, rounded to fp32 once.

    In double the product is exact. The sum may be rounded twice, which matters if the first rounding gives the middle
    of two fp32 numbers.
    """
    product = first.double() * second
    total = product + third
    result, below = total.float(), total.view(torch.int64) & _BELOW_MIDDLE
    if torch.count_nonzero(below) < below.numel():
        middle = below == 0
        result[middle] = _to_odd(product[middle], third[middle].double(), total[middle]).float()
    return result


def _to_odd(first: Tensor, second: Tensor, total: Tensor) -> Tensor:
    """Return a sum in double; if it is not exact, its neighbour with an odd last bit, which is no middle."""
    part = total - first
    error = (first - (total - part)) + (second - part)
    even = total.view(torch.int64) & 1 == 0
    odd = torch.nextafter(total, error.sign() * torch.inf)
    return torch.where((error.abs() > 0) & even, odd, total)


def _root(value: Tensor) -> Tensor:
    return value.double().sqrt().float()


# Polynomials over two elements modulo that of crc32, as in native/polynomials.h.
_POLYNOMIAL, _ONE = 0xEDB88320, 0x80000000


def _product(first: int, second: int) -> int:
    result = 0
    while first:
        if first & _ONE:
            result ^= second
        first = first << 1 & 0xFFFFFFFF
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return result


@functools.lru_cache(maxsize=64)
def _power_of_bytes(num_bytes: int) -> int:
    """Return what a checksum is multiplied by when `num_bytes` more bytes follow: x^(8 * num_bytes)."""
    result, square = _ONE, _ONE >> 8
    while num_bytes:
        if num_bytes & 1:
            result = _product(result, square)
        square, num_bytes = _product(square, square), num_bytes >> 1
    return result
