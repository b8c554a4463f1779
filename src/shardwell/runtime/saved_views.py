"""What autograd is given instead of views of a unit's buffer, which is freed until the backward (see `hooks.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwell.sharding import ShardedGroup, Unit


@dataclass(slots=True, eq=False)
class SavedView:
    """The description of a view of a group's flat buffer, without the buffer."""

    unit: Unit
    group: ShardedGroup
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    version: int
    parameter: Tensor | None  # the parameter that shares the view's version counter
    is_parameter: bool  # the view is that parameter itself
    num_updates: int  # of the unit, when the view was saved


@dataclass(slots=True, eq=False)
class SavedWrapper:
    """A tensor that keeps its values in other tensors, such as a DTensor: those are packed, and it is made again."""

    kind: type[Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    plain: dict[str, Any]
    packed: dict[str, Any]

    def unpack(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        """Return the tensor; `unpack` returns those that it keeps its values in."""
        inner = {name: unpack(one) for name, one in self.packed.items()}
        made: Tensor = self.kind.__tensor_unflatten__({**self.plain, **inner}, self.context, self.size, self.stride)
        return made


DESCRIBED = (SavedView, SavedWrapper)


def pack_wrapper(tensor: Any, pack: Callable[[Tensor], Any]) -> SavedWrapper:
    """Return the description of a tensor that keeps its values in other tensors, which `pack` describes."""
    names, context = tensor.detach().__tensor_flatten__()
    inside = {name: getattr(tensor, name) for name in names}
    plain = {name: value for name, value in inside.items() if not isinstance(value, Tensor)}
    packed = {name: pack(value) for name, value in inside.items() if isinstance(value, Tensor)}
    return SavedWrapper(type(tensor), context, tensor.shape, tensor.stride(), plain, packed)


def versions(tensor: Tensor, expected: int) -> str:
    """Return what torch says of a tensor that was changed in place."""
    return (
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {expected} instead"
    )


def changed(what: str) -> RuntimeError:
    """Return an error in torch's own wording, so that users who know it find the cause."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what}. Run the forward again, or change a copy."
    )
