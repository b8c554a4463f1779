"""The rules that the kernels know, and the coefficients of one step of each.

Coefficients are computed in double and rounded to fp32 once, here, for the library and the reference alike. The
structures mirror those of native/shardwell_native.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar


class _Numbers(ctypes.Structure):
    """fp32 fields, and int32 flags."""


class AdamNumbers(_Numbers):
    _fields_: ClassVar = [
        ("weight1", ctypes.c_float),
        ("beta2", ctypes.c_float),
        ("weight2", ctypes.c_float),
        ("step_size", ctypes.c_float),
        ("root", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("coupled", ctypes.c_float),
    ]
    weight1: float
    beta2: float
    weight2: float
    step_size: float
    root: float
    eps: float
    decay: float
    coupled: float


class SgdNumbers(_Numbers):
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


class AdagradNumbers(_Numbers):
    _fields_: ClassVar = [("rate", ctypes.c_float), ("eps", ctypes.c_float), ("coupled", ctypes.c_float)]
    rate: float
    eps: float
    coupled: float


class LionNumbers(_Numbers):
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
class Adam:
    """Adam in torch's formulation; AdamW if the weight decay is decoupled. State: first and second moment."""

    lr: float
    step: int  # counted from 1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    @property
    def num_states(self) -> int:
        return 2

    def numbers(self) -> AdamNumbers:
        beta1, beta2 = self.betas
        return AdamNumbers(
            weight1=1 - beta1,
            beta2=beta2,
            weight2=1 - beta2,
            step_size=-self.lr / (1 - beta1**self.step),
            root=(1 - beta2**self.step) ** 0.5,
            eps=self.eps,
            decay=1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            coupled=0.0 if self.decoupled else self.weight_decay,
        )


@dataclass(frozen=True)
class Sgd:
    """SGD. State: the momentum, if there is one; `first` says that it holds nothing yet."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    first: bool = False

    @property
    def num_states(self) -> int:
        return 1 if self.momentum else 0

    def numbers(self) -> SgdNumbers:
        return SgdNumbers(
            rate=-self.lr,
            momentum=self.momentum,
            weight=1 - self.dampening,
            coupled=self.weight_decay,
            nesterov=int(self.nesterov),
            first=int(self.first),
        )


@dataclass(frozen=True)
class Adagrad:
    """Adagrad. State: the sum of squares."""

    lr: float
    step: int  # counted from 1
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0

    @property
    def num_states(self) -> int:
        return 1

    def numbers(self) -> AdagradNumbers:
        rate = -self.lr / (1 + (self.step - 1) * self.lr_decay)
        return AdagradNumbers(rate=rate, eps=self.eps, coupled=self.weight_decay)


@dataclass(frozen=True)
class Lion:
    """Lion, as `shardwell.optim.lion`. State: the momentum."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    @property
    def num_states(self) -> int:
        return 1

    def numbers(self) -> LionNumbers:
        beta1, beta2 = self.betas
        return LionNumbers(weight1=1 - beta1, weight2=1 - beta2, rate=-self.lr, decay=1 - self.lr * self.weight_decay)


Rule = Adam | Sgd | Adagrad | Lion
