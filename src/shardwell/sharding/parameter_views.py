"""The parameters of a group as views: each has its own slice of the flat buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwell.memory import FlatBuffer
from shardwell.sharding.layout import Layout, TensorSpec


@dataclass(frozen=True)
class GroupMember:
    """A parameter on its way into a group."""

    name: str
    parameter: nn.Parameter
    label: int  # its parameter group in the optimizer
    trainable: bool = True  # or was, and keeps what training needs

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec.dense(self.name, self.parameter.shape, self.parameter.stride(), self.label)


class ParameterViews:
    """The views that a group's parameters are, in slot order."""

    def __init__(self, flat: FlatBuffer, layout: Layout, parameters: list[nn.Parameter]) -> None:
        self._flat, self._layout, self._parameters = flat, layout, parameters
        self.views: list[Tensor] = []
        used = [index for index, slot in enumerate(layout.slots) if slot.numel]  # the others have no address
        self._used = [parameters[index] for index in used]
        self._offsets = [layout.slots[index].offset * flat.tensor.itemsize for index in used]
        self._addresses: tuple[int, list[int]] = (-1, [])  # of the flat buffer, and of the parameters in it

    def hang(self, index: int) -> Tensor:
        """Make a parameter a view of its place; they are hung in order the first time."""
        slot = self._layout.slots[index]
        view = self._flat.tensor.as_strided(slot.shape, slot.stride, slot.offset)
        self.views[index : index + 1] = [view]
        self._parameters[index].data = view
        return view

    def hang_all(self) -> None:
        """Make all of them views of the flat buffer, which has other memory now."""
        self.views = []
        for index in range(len(self._parameters)):
            self.hang(index)

    def begin_there(self) -> bool:
        """Every parameter begins where its place does: most that are no views of it any more do not.

        Parameters that are away must not go through the guard for that.
        """
        base = self._flat.tensor.data_ptr()  # 0 while it is dropped
        if base != self._addresses[0]:
            self._addresses = base, [base + offset for offset in self._offsets]
        return list(map(Tensor.data_ptr, self._used)) == self._addresses[1]

    def left(self) -> list[int]:
        """Which parameters are no views of their places, whatever they are."""
        pairs = zip(self._parameters, self.views, strict=True)
        if self._flat.tensor.is_meta:  # where nobody can tell one memory from another
            return [index for index, (parameter, view) in enumerate(pairs) if parameter.shape != view.shape]
        with torch._C.DisableTorchFunctionSubclass():
            return [
                index
                for index, (parameter, view) in enumerate(pairs)
                if not parameter.is_set_to(view) and view.numel() + parameter.numel()
            ]
