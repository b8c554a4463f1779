"""The parameters of a group as views: each is a slice of the flat buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwell.memory import FlatBuffer
from shardwell.sharding.layout import Layout, TensorSpec


@dataclass(frozen=True)
class GroupMember:
    """A parameter that a group is built from."""

    name: str
    parameter: nn.Parameter
    label: int  # its parameter group in the optimizer
    trainable: bool = True  # it trains, or has trained and keeps what training needs

    @property
    def spec(self) -> TensorSpec:
        """Return the entry of the parameter for the layout."""
        return TensorSpec.dense(self.name, self.parameter.shape, self.parameter.stride(), self.label)


class ParameterViews:
    """The views of a group's flat buffer that its parameters are, in slot order."""

    def __init__(self, flat: FlatBuffer, layout: Layout, parameters: list[nn.Parameter]) -> None:
        self._flat, self._layout, self._parameters = flat, layout, parameters
        self.tensors: list[Tensor] = []
        used = [index for index, slot in enumerate(layout.slots) if slot.numel]  # empty ones have no address
        self._used = [parameters[index] for index in used]
        self._offsets = [layout.slots[index].offset * flat.tensor.itemsize for index in used]
        self._addresses: tuple[int, list[int]] = (-1, [])  # of the flat buffer, and of its parameters

    def make_view(self, index: int) -> Tensor:
        """Make a parameter a view of its slot; the first calls must be in slot order."""
        slot = self._layout.slots[index]
        view = self._flat.tensor.as_strided(slot.shape, slot.stride, slot.offset)
        self.tensors[index : index + 1] = [view]
        self._parameters[index].data = view
        return view

    def make_all(self) -> None:
        """Make all parameters views of the flat buffer, whose memory has changed."""
        self.tensors = []
        for index in range(len(self._parameters)):
            self.make_view(index)

    def replaced(self, *, quickly: bool = False) -> list[int]:
        """Return the indices of parameters that are no longer views of their slots.

        `quickly`: most of them have another address; there are none if each parameter has the address of its slot.
        Released parameters must not go through `ReleasedParameter.__torch_function__` here.
        """
        found: list[int] = []
        with torch._C.DisableTorchFunctionSubclass():
            if quickly:
                base = self._flat.tensor.data_ptr()  # 0 while it is freed
                if base != self._addresses[0]:
                    self._addresses = base, [base + offset for offset in self._offsets]
                if list(map(Tensor.data_ptr, self._used)) == self._addresses[1]:
                    return found
            is_meta = self._flat.tensor.is_meta  # meta tensors have no memory to compare
            for index, (parameter, view) in enumerate(zip(self._parameters, self.tensors, strict=True)):
                if is_meta:
                    is_view = parameter.shape == view.shape
                else:
                    is_view = parameter.is_set_to(view) or not view.numel() + parameter.numel()
                if not is_view:
                    found.append(index)
        return found
