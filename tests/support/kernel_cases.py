"""Numbers that are hard to get right, stretches made of them, and the backends of this machine."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from shardwell import kernels
from shardwell.kernels import Moments8bitArgs, OutOfPlaceState, SplitMaster, UpdateArgs
from shardwell.kernels.library import ISAS, Library, UnusableLibraryError, find
from shardwell.kernels.reference import Reference

REFERENCE = Reference()
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
RULES: dict[str, kernels.Rule] = {
    "adam": kernels.AdamRule(1e-3, 3, weight_decay=0.1),
    "adam without decay": kernels.AdamRule(1e-3, 1),
    "adam with small betas": kernels.AdamRule(1e-2, 5, betas=(0.3, 0.4), eps=1e-6),
    "adamw": kernels.AdamRule(3e-4, 1000, weight_decay=0.01, decoupled=True),
    "adamw like the fused kernel": kernels.AdamRule(3e-4, 7, weight_decay=0.01, decoupled=True, like="cuda_fused"),
    "adam like the fused kernel": kernels.AdamRule(3e-4, 1, weight_decay=0.1, like="cuda_fused"),
    "adamw like the CPU's": kernels.AdamRule(3e-4, 1000, weight_decay=0.01, decoupled=True, like="cpu"),
    "sgd": kernels.SgdRule(0.1),
    "sgd with decay": kernels.SgdRule(0.1, weight_decay=1e-4),
    "sgd with momentum": kernels.SgdRule(0.1, momentum=0.9, dampening=0.1, weight_decay=1e-4),
    "sgd, first step": kernels.SgdRule(0.1, momentum=0.9, dampening=0.1, first=True),
    "sgd with nesterov": kernels.SgdRule(0.1, momentum=0.9, nesterov=True),
    "adagrad": kernels.AdagradRule(0.01, 7, lr_decay=0.1, weight_decay=0.1),
    "lion": kernels.LionRule(1e-4, weight_decay=0.1),
    "lion with small betas": kernels.LionRule(1e-4, betas=(0.2, 0.5)),
}


def isas() -> list[str]:
    """The instruction sets that the library has on this machine; empty without a library."""
    try:
        best = Library(find(kernels.__path__)).isa
    except UnusableLibraryError:
        return []
    return list(ISAS[: ISAS.index(best) + 1])


@functools.cache
def library(isa: str) -> Library:
    return Library(find(kernels.__path__), isa)


def any_bits(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Every bit pattern is as likely as any other: inf and NaN among them, and numbers of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    width = 8 * dtype.itemsize
    bits = torch.randint(-(2 ** (width - 1)), 2 ** (width - 1), (numel,), generator=generator)
    values = bits.to(INTEGERS[dtype]).view(dtype)
    edges = [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 3.4028235e38, float("inf"), float("nan"), 1.0]
    places = torch.randint(max(numel, 1), (min(numel, 64),), generator=generator)
    chosen = torch.tensor(edges).to(dtype)[torch.arange(len(places)) % len(edges)]
    values[places] = chosen
    return values


def likely(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers as they occur in training, of several sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-8, 1, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * sizes).to(dtype)


def stretch(
    numel: int,
    states: int,
    gradient: torch.dtype = torch.bfloat16,
    halves: bool = False,
    out: torch.dtype | None = torch.bfloat16,
    factor: float = 1.0,
    make: object = any_bits,
    offset: int = 0,
) -> UpdateArgs:
    """Tensors that begin `offset` elements into their storage, each a little further than the one before."""
    assert callable(make)

    def at(place: int, dtype: torch.dtype, seed: int) -> Tensor:
        room: Tensor = make(numel + offset * place, dtype, seed)
        return room[offset * place :]

    master: Tensor | SplitMaster = at(2, torch.float32, 2)
    if halves:
        master = SplitMaster(at(2, torch.bfloat16, 2), at(3, torch.float16, 3).view(torch.int16))
    state = tuple(at(4 + index, torch.float32, 4 + index) for index in range(states))
    if states == 2:  # what is squared is not negative
        state = state[0], state[1].abs()
    return UpdateArgs(
        at(1, gradient, 1),
        master,
        state,
        factor,
        None if out is None else torch.zeros(numel + offset, dtype=out)[offset:],
    )


def copied(given: UpdateArgs) -> UpdateArgs:
    """The same, where nothing of it is shared. Offsets are kept."""
    master, state = given.master, given.state
    return replace(
        given,
        gradient=_copied(given.gradient),
        master=SplitMaster(*map(_copied, master)) if isinstance(master, SplitMaster) else _copied(master),
        state=Moments8bitArgs(_pair(state.codes), _pair(state.exponents))
        if isinstance(state, Moments8bitArgs)
        else tuple(map(_copied, state)),
        out=None if given.out is None else _copied(given.out),
    )


def out_of_place(given: UpdateArgs) -> tuple[UpdateArgs, UpdateArgs]:
    """The same with other memory for its results, which holds sevens so far; and what is there, as a stretch."""
    there = copied(given)
    for tensor in written(there).values():
        tensor.fill_(7)
    return replace(given, out=there.out, new=OutOfPlaceState(there.master, there.state)), there


def _pair(tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return _copied(tensors[0]), _copied(tensors[1])


def _copied(tensor: Tensor) -> Tensor:
    first = tensor.storage_offset()
    room = torch.empty(first + tensor.numel(), dtype=tensor.dtype)[first:]
    return room.copy_(tensor)


def written(given: UpdateArgs) -> dict[str, Tensor]:
    """What an update changes, by name."""
    found: dict[str, Tensor] = {}
    if isinstance(given.master, SplitMaster):
        found |= {"high": given.master.high, "low": given.master.low}
    else:
        found["master"] = given.master
    if isinstance(given.state, Moments8bitArgs):
        for index in range(2):
            found |= {f"codes {index}": given.state.codes[index], f"exponents {index}": given.state.exponents[index]}
    else:
        found |= {f"state {index}": state for index, state in enumerate(given.state)}
    return found if given.out is None else {**found, "out": given.out}


def differing(first: UpdateArgs, second: UpdateArgs) -> dict[str, int]:
    """How many elements of what was written differ in a bit. Two NaN are the same, and what lies below them."""
    nan = torch.zeros(0)
    if isinstance(first.master, SplitMaster) and isinstance(second.master, SplitMaster):
        nan = first.master.high.isnan() & second.master.high.isnan()
    counts = {}
    for (name, one), other in zip(written(first).items(), written(second).values(), strict=True):
        unlike = bits(one) != bits(other)
        if one.dtype.is_floating_point:
            unlike &= ~(one.isnan() & other.isnan())
        elif name == "low":
            unlike &= ~nan
        counts[name] = int(unlike.sum())
    return {name: count for name, count in counts.items() if count}


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.dtype]) if tensor.dtype in INTEGERS else tensor
