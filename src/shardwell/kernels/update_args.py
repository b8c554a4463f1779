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
        home = home_of(self.master)
        check("gradient", self.gradient, self.numel, *GRADIENTS, home=home)
        _check_slot(self.master, self.state, self.numel, home)
        if self.new is not None:
            _check_slot(*self.new, self.numel, home, "new ")
            if _form(*self.new) != _form(self.master, self.state):
                raise ShardwellError(
                    f"new: found {_form(*self.new)}, expected the form of the old: {_form(self.master, self.state)}"
                )
        if self.out is not None:
            check("out", self.out, self.numel, *_SIXTEEN, home=home)

    @property
    def numel(self) -> int:
        return self.gradient.numel()

    @property
    def num_bytes(self) -> int:
        """The bytes of host memory that the update reads and writes."""
        old = _num_bytes(self.master, self.state)  # read, and written there or to `new`
        return self.gradient.nbytes + 2 * old + (0 if self.out is None else self.out.nbytes)


def _num_bytes(master: Tensor | SplitMaster, state: tuple[Tensor, ...] | Moments8bitArgs) -> int:
    parts = [*(master if isinstance(master, SplitMaster) else (master,))]
    parts += [*state.codes, *state.exponents] if isinstance(state, Moments8bitArgs) else [*state]
    return sum(part.nbytes for part in parts)


def _check_slot(
    master: Tensor | SplitMaster, state: tuple[Tensor, ...] | Moments8bitArgs, numel: int, home: str, prefix: str = ""
) -> None:
    if isinstance(master, SplitMaster):
        check(f"high half of the {prefix}master", master.high, numel, torch.bfloat16, home=home)
        check(f"low half of the {prefix}master", master.low, numel, torch.int16, home=home)
    else:
        check(f"{prefix}master", master, numel, torch.float32, home=home)
    if isinstance(state, Moments8bitArgs):
        for name, codes, exponents in zip(("first", "second"), state.codes, state.exponents, strict=True):
            check(f"codes of the {prefix}{name} moment", codes, numel, torch.uint8, home=home)
            check(f"exponents of the {prefix}{name} moment", exponents, -(-numel // BLOCK), torch.uint8, home=home)
    else:
        for index, one in enumerate(state):
            check(f"{prefix}state {index}", one, numel, torch.float32, home=home)


def _form(master: Tensor | SplitMaster, state: tuple[Tensor, ...] | Moments8bitArgs) -> str:
    kept = "8-bit moments" if isinstance(state, Moments8bitArgs) else f"{len(state)} tensors of state"
    return f"a master {'in halves' if isinstance(master, SplitMaster) else 'in fp32'} and {kept}"


def home_of(tensor: Tensor | SplitMaster) -> str:
    """Return the device on which a kernel expects all its tensors: the host's memory, or that of a simulation."""
    first = tensor.high if isinstance(tensor, SplitMaster) else tensor
    return "meta" if first.is_meta else "cpu"


def check(name: str, tensor: Tensor, numel: int, *dtypes: torch.dtype, home: str = "cpu") -> None:
    """Raise if a kernel cannot take the tensor."""
    expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if tensor.device.type != home or tensor.layout is not torch.strided:
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
