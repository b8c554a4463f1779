"""The update rules that the kernels implement, and the coefficients of one step of each.

Coefficients are computed as in torch, mostly in double, and rounded to fp32 here, for the library and the reference
alike. The structures mirror those of native/shardwell_native.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar, Literal

Like = Literal["cuda", "cuda_fused", "cpu"]
LIKES: tuple[Like, ...] = ("cuda", "cuda_fused", "cpu")  # the index is the number in the library


class _Numbers(ctypes.Structure):
    """A structure of fp32 fields and int32 flags."""


class AdamCoefficients(_Numbers):
    """The coefficients of one step of Adam."""

    _fields_: ClassVar = [
        ("beta1", ctypes.c_float),
        ("weight1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("weight2", ctypes.c_float),
        ("step_size", ctypes.c_float),
        ("root", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("coupled", ctypes.c_float),
        ("like", ctypes.c_int32),
    ]
    beta1: float
    weight1: float
    beta2: float
    weight2: float
    step_size: float
    root: float
    eps: float
    decay: float
    coupled: float
    like: int


class SgdCoefficients(_Numbers):
    """The coefficients of one step of SGD."""

    _fields_: ClassVar = [
        ("rate", ctypes.c_float),
        ("momentum", ctypes.c_float),
        ("weight", ctypes.c_float),
        ("coupled", ctypes.c_float),
        ("nesterov", ctypes.c_int32),
        ("first", ctypes.c_int32),
    ]
    rate: float
    momentum: float
    weight: float
    coupled: float
    nesterov: int
    first: int


class AdagradCoefficients(_Numbers):
    """The coefficients of one step of Adagrad."""

    _fields_: ClassVar = [("rate", ctypes.c_float), ("eps", ctypes.c_float), ("coupled", ctypes.c_float)]
    rate: float
    eps: float
    coupled: float


class LionCoefficients(_Numbers):
    """The coefficients of one step of Lion."""

    _fields_: ClassVar = [
        ("weight1", ctypes.c_float),
        ("weight2", ctypes.c_float),
        ("rate", ctypes.c_float),
        ("decay", ctypes.c_float),
    ]
    weight1: float
    weight2: float
    rate: float
    decay: float


@dataclass(frozen=True)
class AdamRule:
    """Adam in torch's formulation; AdamW if the weight decay is decoupled. State: first and second moment.

    torch itself rounds in three ways, and `like` selects whose bits to reproduce: those of its foreach operations on
    CUDA (the default there), of its fused kernel there, whose coefficients are less exact, or of its operations on the
    CPU.
    """

    lr: float
    step: int  # counted from 1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    like: Like = "cuda"

    @property
    def num_states(self) -> int:
        return 2

    def numbers(self) -> AdamCoefficients:
        """Return the coefficients of the step."""
        beta1, beta2 = self.betas
        numbers = AdamCoefficients(
            beta1=beta1,
            weight1=1 - beta1,
            beta2=beta2,
            weight2=1 - beta2,
            step_size=-self.lr / (1 - beta1**self.step),
            root=(1 - beta2**self.step) ** 0.5,
            eps=self.eps,
            decay=1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            coupled=0.0 if self.decoupled else self.weight_decay,
            like=LIKES.index(self.like),
        )
        if self.like == "cuda_fused":
            lr = _fp32(self.lr)
            numbers.step_size = -lr / _fp32(1 - _fp32(numbers.beta1**self.step))
            numbers.root = _fp32(1 - _fp32(numbers.beta2**self.step)) ** 0.5
            numbers.decay = -lr * _fp32(self.weight_decay) if self.decoupled else 0.0
        return numbers


def _fp32(value: float) -> float:
    return ctypes.c_float(value).value


@dataclass(frozen=True)
class SgdRule:
    """SGD. State: the momentum, if there is one; `first` means that it holds nothing yet."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    first: bool = False

    @property
    def num_states(self) -> int:
        return 1 if self.momentum else 0

    def numbers(self) -> SgdCoefficients:
        """Return the coefficients of the step."""
        return SgdCoefficients(
            rate=-self.lr,
            momentum=self.momentum,
            weight=1 - self.dampening,
            coupled=self.weight_decay,
            nesterov=int(self.nesterov),
            first=int(self.first),
        )


@dataclass(frozen=True)
class AdagradRule:
    """Adagrad. State: the sum of squares."""

    lr: float
    step: int  # counted from 1
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0

    @property
    def num_states(self) -> int:
        return 1

    def numbers(self) -> AdagradCoefficients:
        """Return the coefficients of the step."""
        rate = -self.lr / (1 + (self.step - 1) * self.lr_decay)
        return AdagradCoefficients(rate=rate, eps=self.eps, coupled=self.weight_decay)


@dataclass(frozen=True)
class LionRule:
    """Lion, as in `shardwell.optim.lion`. State: the momentum."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    @property
    def num_states(self) -> int:
        return 1

    def numbers(self) -> LionCoefficients:
        """Return the coefficients of the step."""
        beta1, beta2 = self.betas
        return LionCoefficients(
            weight1=1 - beta1, weight2=1 - beta2, rate=-self.lr, decay=1 - self.lr * self.weight_decay
        )


Rule = AdamRule | SgdRule | AdagradRule | LionRule
