"""The arguments of one kernel call: 1-D tensors in host memory, checked when they are put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwell.errors import ShardwellError

BLOCK = 256  # elements that share the exponents of their 8-bit moments
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
_SIXTEEN = (torch.bfloat16, torch.float16)


class SplitMaster(NamedTuple):
    """Fp32 master weights as bf16 plus remainder, as `shardwell.kernels.rounding.split` writes them."""

    high: Tensor  # bf16
    low: Tensor  # int16


@dataclass(frozen=True)
class Moments8bitArgs:
    """Adam's moments in 8 bits: a code for each element, an exponent for each block of 256. Zeros stay zero.

    With M the greatest first and V the greatest second moment of a block, the stored value is off by at most

        first moment m     |m| / 8 + M / 2^17
        second moment v    v / 8, or up to V / 2^30 where v is smaller than that

    and is right on average: values are rounded up or down at random, in proportion, by a hash of the call's seed and
    the element's index. A second moment that is too small for its block is stored as the least value that is not, which
    makes steps smaller, never larger. A NaN or an infinity invalidates its block.
    """

    codes: tuple[Tensor, Tensor]  # uint8
    exponents: tuple[Tensor, Tensor]  # uint8

    @classmethod
    def zeros(cls, numel: int) -> Moments8bitArgs:
        blocks = -(-numel // BLOCK)

        def pair(length: int) -> tuple[Tensor, Tensor]:
            first, second = (torch.zeros(length, dtype=torch.uint8, device="cpu") for _ in range(2))
            return first, second

        return cls(pair(numel), pair(blocks))


class OutOfPlaceState(NamedTuple):
    """The memory for an update that is not in place, in the form of the old master weights and state."""

    master: Tensor | SplitMaster
    state: tuple[Tensor, ...] | Moments8bitArgs = ()


@dataclass(frozen=True)
class UpdateArgs:
    """The elements of one update.

    The gradient is multiplied by `factor`. Master weights and state are updated in place; with `new` they are only
    read, and `new` is written. The new parameter is also written to `out` in 16 bits: bf16 is rounded like
    `rounding.py`, fp16 like torch. `seed` is that of the rounding of 8-bit moments and must differ from step to step.
    """

    gradient: Tensor
    master: Tensor | SplitMaster
    state: tuple[Tensor, ...] | Moments8bitArgs = ()
    factor: float = 1.0
    out: Tensor | None = None
    seed: int = 0
    new: OutOfPlaceState | None = None

    def __post_init__(self) -> None:
        check("gradient", self.gradient, self.numel, *GRADIENTS)
        _check_slot(self.master, self.state, self.numel)
        if self.new is not None:
            _check_slot(*self.new, self.numel, "new ")
            if _form(*self.new) != _form(self.master, self.state):
                raise ShardwellError(
                    f"new: found {_form(*self.new)}, expected the form of the old: {_form(self.master, self.state)}"
                )
        if self.out is not None:
            check("out", self.out, self.numel, *_SIXTEEN)

    @property
    def numel(self) -> int:
        return self.gradient.numel()


def _check_slot(
    master: Tensor | SplitMaster, state: tuple[Tensor, ...] | Moments8bitArgs, numel: int, prefix: str = ""
) -> None:
    if isinstance(master, SplitMaster):
        check(f"high half of the {prefix}master", master.high, numel, torch.bfloat16)
        check(f"low half of the {prefix}master", master.low, numel, torch.int16)
    else:
        check(f"{prefix}master", master, numel, torch.float32)
    if isinstance(state, Moments8bitArgs):
        for name, codes, exponents in zip(("first", "second"), state.codes, state.exponents, strict=True):
            check(f"codes of the {prefix}{name} moment", codes, numel, torch.uint8)
            check(f"exponents of the {prefix}{name} moment", exponents, -(-numel // BLOCK), torch.uint8)
    else:
        for index, one in enumerate(state):
            check(f"{prefix}state {index}", one, numel, torch.float32)


def _form(master: Tensor | SplitMaster, state: tuple[Tensor, ...] | Moments8bitArgs) -> str:
    kept = "8-bit moments" if isinstance(state, Moments8bitArgs) else f"{len(state)} tensors of state"
    return f"a master {'in halves' if isinstance(master, SplitMaster) else 'in fp32'} and {kept}"


def check(name: str, tensor: Tensor, numel: int, *dtypes: torch.dtype) -> None:
    """Raise if a kernel cannot take the tensor."""
    expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ShardwellError(
            f"{name}: found a {tensor.layout} tensor on {tensor.device}, expected a dense one in host memory: copy it"
        )
    if tensor.dtype not in dtypes:
        raise ShardwellError(f"{name}: found {str(tensor.dtype).removeprefix('torch.')}, expected {expected}")
    if tensor.ndim != 1 or not tensor.is_contiguous():
        raise ShardwellError(
            f"{name}: found shape {list(tensor.shape)} with strides {list(tensor.stride())}, expected one dimension "
            "without gaps: pass a flat view, or a contiguous copy"
        )
    if tensor.numel() != numel:
        raise ShardwellError(f"{name}: found {tensor.numel()} elements, expected {numel}")
