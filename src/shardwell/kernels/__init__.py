"""Optimizer steps in host memory: one pass over gradient, master weights and state, compiled if there was a compiler.

`update` applies one step of a rule to a slice of elements. The compiled library and the torch reference give the same
bits; one of them is chosen at the first call. SHARDWELL_NATIVE=0 selects the reference, SHARDWELL_NATIVE=1 requires the
library, and SHARDWELL_NATIVE_ISA (scalar, avx2, avx512) limits the instruction set. The package works on tensors in
host memory and does not depend on engines. On tensors without values (meta) nothing is computed, and sums are zero.
"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwell import spans, virtual_time
from shardwell.errors import ShardwellError
from shardwell.kernels.file_read import FileRead
from shardwell.kernels.library import ISAS, Library, UnusableLibraryError, find
from shardwell.kernels.moment8bit import Moment8bit
from shardwell.kernels.reference import Reference
from shardwell.kernels.rules import AdagradRule, AdamRule, Like, LionRule, Rule, SgdRule
from shardwell.kernels.update_args import (
    BLOCK,
    GRADIENTS,
    Moments8bitArgs,
    OutOfPlaceState,
    SplitMaster,
    UpdateArgs,
    check,
    home_of,
)

__all__ = [
    "BLOCK",
    "AdagradRule",
    "AdamRule",
    "FileRead",
    "KernelInfo",
    "Like",
    "LionRule",
    "Moment8bit",
    "Moments8bitArgs",
    "OutOfPlaceState",
    "Rule",
    "SgdRule",
    "SplitMaster",
    "UpdateArgs",
    "add",
    "compiled",
    "crc32",
    "crc32_blocks",
    "crc32_combine",
    "describe",
    "read_blocks",
    "sum_of_squares",
    "to_bf16",
    "update",
]

Backend = Library | Reference


@dataclass(frozen=True)
class KernelInfo:
    """The kernels in use."""

    native: bool
    isa: str  # an instruction set, or "torch"
    reason: str | None = None  # why the library is not used

    def __str__(self) -> str:
        return f"compiled, {self.isa}" if self.native else f"torch operations ({self.reason})"


def update(rule: Rule, args: UpdateArgs, threads: int | None = None) -> None:
    """Apply one step. No other code may use the tensors of `args` until the call returns; no lock is held."""
    if isinstance(args.state, Moments8bitArgs):
        if not isinstance(rule, AdamRule):
            raise ShardwellError(f"{type(rule).__name__}: found 8-bit moments, which only Adam has")
    elif len(args.state) != rule.num_states:
        raise ShardwellError(
            f"{type(rule).__name__}: found {len(args.state)} tensors of state, expected {rule.num_states}"
        )
    if args.gradient.is_meta:
        if virtual_time.clock is not None:
            is_packed = isinstance(args.state, Moments8bitArgs)
            virtual_time.clock.host_work(
                "host update", args.num_bytes, out_of_place=args.new is not None, eight_bit=is_packed
            )
        return
    listener, begin = spans.listener, time.perf_counter()
    _chosen()[0].update(rule, args, _threads(threads))
    if listener is not None:
        listener.span("host update", "host update", begin, time.perf_counter(), args.num_bytes)


def add(
    total: Tensor, gradient: Tensor, factor: float = 1.0, threads: int | None = None, *, fresh: bool = False
) -> None:
    """Add `factor` times a gradient (fp32, bf16 or fp16) to an fp32 total; with `fresh` the total is overwritten."""
    home = home_of(total)
    check("total", total, gradient.numel(), torch.float32, home=home)
    check("gradient", gradient, gradient.numel(), *GRADIENTS, home=home)
    num_bytes = gradient.nbytes + (1 if fresh else 2) * total.nbytes
    if gradient.is_meta:
        if virtual_time.clock is not None:
            virtual_time.clock.host_work("host sum", num_bytes)
        return
    listener, begin = spans.listener, time.perf_counter()
    _chosen()[0].add(total, gradient, factor, fresh, _threads(threads))
    if listener is not None:
        listener.span("host update", "host sum", begin, time.perf_counter(), num_bytes)


def sum_of_squares(data: Tensor, threads: int | None = None) -> float:
    """Return the sum of squares of an fp32, bf16 or fp16 tensor in double; it is finite if all elements are.

    The result of the library does not depend on threads or instruction set; that of the reference may differ in the
    last digits.
    """
    check("data", data, data.numel(), *GRADIENTS, home=home_of(data))
    if data.is_meta:
        if virtual_time.clock is not None:
            virtual_time.clock.host_work("host norm", data.nbytes)
        return 0.0
    return _chosen()[0].sum_of_squares(data, _threads(threads))


def to_bf16(source: Tensor, out: Tensor, threads: int | None = None) -> Tensor:
    """Round like `shardwell.kernels.rounding.to_bf16`, for 1-D tensors in host memory."""
    check("source", source, source.numel(), torch.float32)
    check("out", out, source.numel(), torch.bfloat16)
    _chosen()[0].to_bf16(source, out, _threads(threads))
    return out


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Return the same checksum as `zlib.crc32`."""
    return _chosen()[0].crc32(data, value)


def crc32_blocks(data: bytes | bytearray | memoryview, block: int, value: int = 0) -> tuple[int, bytes]:
    """Return what `crc32` returns, and the checksums of blocks of `block` bytes, each in four bytes, big-endian.

    Each byte is processed once. The last block may be shorter.
    """
    return _chosen()[0].crc32_blocks(data, block, value)


def read_blocks(read: FileRead) -> bytes:
    """Read bytes of a file, and return the checksums of their blocks, each in four bytes, big-endian.

    `EOFError` is raised if the file ends too soon.
    """
    return _chosen()[0].read_blocks(read)


def crc32_combine(first: int, second: int, num_bytes: int) -> int:
    """Return the checksum of bytes with the checksum `first`, followed by `num_bytes` bytes with `second`."""
    return _chosen()[0].crc32_combine(first, second, num_bytes)


def compiled() -> Library | None:
    """Return the compiled library, or None if it is not in use."""
    backend = _chosen()[0]
    return backend if isinstance(backend, Library) else None


def describe() -> KernelInfo:
    """Return the kernels in use, and the reason."""
    return _chosen()[1]


def _threads(threads: int | None) -> int:
    threads = torch.get_num_threads() if threads is None else threads
    if threads < 1:
        raise ShardwellError(f"threads: found {threads}, expected 1 or more")
    return threads


@functools.cache
def _chosen() -> tuple[Backend, KernelInfo]:
    return choose(os.environ.get("SHARDWELL_NATIVE", ""), os.environ.get("SHARDWELL_NATIVE_ISA", ""))


def choose(wish: str, isa: str) -> tuple[Backend, KernelInfo]:
    """Return the backend for the values of SHARDWELL_NATIVE and SHARDWELL_NATIVE_ISA."""
    if wish not in ("", "0", "1"):
        raise ShardwellError(f"SHARDWELL_NATIVE: found '{wish}', expected 0 (never), 1 (always) or nothing")
    if isa not in ("", *ISAS):
        raise ShardwellError(f"SHARDWELL_NATIVE_ISA: found '{isa}', expected one of {', '.join(ISAS)}, or nothing")
    if wish == "0":
        return Reference(), KernelInfo(False, Reference.isa, "SHARDWELL_NATIVE=0")
    try:
        library = Library(find(__path__), isa or None)
    except UnusableLibraryError as error:
        if wish == "1":
            raise
        return Reference(), KernelInfo(False, Reference.isa, str(error))
    return library, KernelInfo(True, library.isa)
