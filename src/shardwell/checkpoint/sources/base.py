"""The interface of all checkpoints, of any library: named tensors, of which any slice can be read.

    model/<name>            a parameter (its master, if it has one) or a buffer, by the model's own name
    state/<name>/<key>      the optimizer's state of a parameter, of the parameter's shape

`values` holds everything else, as JSON.

    scalar/<name>/<key>     a number of the optimizer's state of a parameter: its step count
    aliases                 {other name: name} of parameters that several modules share
    ...                     other values of an engine; only shardwell's own checkpoints have them
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
    """An open checkpoint. Several threads may read from it concurrently."""

    @property
    def where(self) -> str:
        """The name of the source in messages."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    @property
    def values(self) -> Mapping[str, Any]: ...

    @property
    def bytes_read(self) -> int:
        """The bytes of tensors that were read since the source was opened."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` as a 1D CPU tensor in the stored dtype; read no others, if possible."""

    def close(self) -> None: ...
