"""What all checkpoints have in common, whoever wrote them: named tensors, of which any stretch can be read.

    model/<name>            a parameter (its master, if it has one) or a buffer, by the model's own name
    state/<name>/<key>      the optimizer's state of a parameter, of the parameter's shape

`values` holds JSON: what is not a tensor.

    scalar/<name>/<key>     a number of the optimizer's state of a parameter: its step count
    aliases                 {other name: name} of parameters that several modules share
    ...                     what else an engine saves; only checkpoints of shardwell's own have it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwell.sharding.layout import contiguous_stride, product

MODEL, STATE, SCALAR = "model/", "state/", "scalar/"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that can be read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None  # the order of its flat elements; None: contiguous

    @property
    def numel(self) -> int:
        return product(self.shape)

    @property
    def order(self) -> tuple[int, ...]:
        return self.stride if self.stride is not None else contiguous_stride(self.shape)


class Source(Protocol):
    """An open checkpoint. Several threads may read from it at once."""

    @property
    def where(self) -> str:
        """What messages call it."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    @property
    def values(self) -> Mapping[str, Any]: ...

    @property
    def bytes_read(self) -> int:
        """Of tensors, since it was opened."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """1D, on the CPU, in the stored dtype: elements `start` to `stop`. Reads no others, as far as it can."""

    def close(self) -> None: ...
