"""Optimizer steps in host memory: one pass over gradient, master and state, compiled where a compiler was at hand.

`update` applies one step of a rule to a stretch. The library and the torch reference give the same bits; the choice is
made once, at the first call. SHARDWELL_NATIVE=0 takes the reference, SHARDWELL_NATIVE=1 insists on the library, and
SHARDWELL_NATIVE_ISA (scalar, avx2, avx512) limits the instruction set. Knows tensors in host memory and nothing of
engines.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwell.errors import ShardwellError
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
)

__all__ = [
    "BLOCK",
    "AdagradRule",
    "AdamRule",
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
    "describe",
    "sum_of_squares",
    "to_bf16",
    "update",
]

Backend = Library | Reference


@dataclass(frozen=True)
class KernelInfo:
    """Which kernels run."""

    native: bool
    isa: str  # an instruction set, or "torch"
    reason: str | None = None  # why not the library

    def __str__(self) -> str:
        return f"compiled, {self.isa}" if self.native else f"torch operations ({self.reason})"


def update(rule: Rule, stretch: UpdateArgs, threads: int | None = None) -> None:
    """Apply one step. All tensors of the stretch must stay alive and alone until it returns; no lock is held."""
    if isinstance(stretch.state, Moments8bitArgs):
        if not isinstance(rule, AdamRule):
            raise ShardwellError(f"{type(rule).__name__}: found 8-bit moments, which only Adam has")
    elif len(stretch.state) != rule.num_states:
        raise ShardwellError(
            f"{type(rule).__name__}: found {len(stretch.state)} tensors of state, expected {rule.num_states}"
        )
    _chosen()[0].update(rule, stretch, _threads(threads))


def add(
    total: Tensor, gradient: Tensor, factor: float = 1.0, threads: int | None = None, *, fresh: bool = False
) -> None:
    """Add `factor` times a gradient (fp32, bf16 or fp16) to an fp32 total; a fresh total is overwritten by it."""
    check("total", total, gradient.numel(), torch.float32)
    check("gradient", gradient, gradient.numel(), *GRADIENTS)
    _chosen()[0].add(total, gradient, factor, fresh, _threads(threads))


def sum_of_squares(data: Tensor, threads: int | None = None) -> float:
    """Of an fp32, bf16 or fp16 tensor, in double: not finite only if an element is not.

    The library's answer does not depend on threads or instruction set; the reference's may differ in the last digits.
    """
    check("data", data, data.numel(), *GRADIENTS)
    return _chosen()[0].sum_of_squares(data, _threads(threads))


def to_bf16(source: Tensor, out: Tensor, threads: int | None = None) -> Tensor:
    """What `shardwell.kernels.rounding.to_bf16` does, for 1-D tensors in host memory."""
    check("source", source, source.numel(), torch.float32)
    check("out", out, source.numel(), torch.bfloat16)
    _chosen()[0].to_bf16(source, out, _threads(threads))
    return out


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """What `zlib.crc32` gives."""
    return _chosen()[0].crc32(data, value)


def compiled() -> Library | None:
    """The library, if it runs."""
    backend = _chosen()[0]
    return backend if isinstance(backend, Library) else None


def describe() -> KernelInfo:
    """Which kernels run, and why not others."""
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
    """The backend for what the environment says."""
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
