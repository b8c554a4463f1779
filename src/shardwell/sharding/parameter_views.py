"""The parameters of a group as views of its flat buffer, and which of them the user has replaced.

`ModelFit` asks before every forward and step whether there are any; what follows is in `edits.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardwell.memory import FlatBuffer
from shardwell.sharding.layout import ALIGNMENT, Layout, Packed, TensorSpec, product
from shardwell.sharding.tensor_part import part_of

if TYPE_CHECKING:
    pass


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
        spec = TensorSpec.dense(self.name, self.parameter.shape, self.parameter.stride(), self.label)
        part = part_of(self.parameter)
        if part is None:
            return spec
        packed = Packed(part.dim, tuple(one for one in part.ranges if one[0] < one[1])) if part.blocks else None
        parts = (part.shape_of(index) for index in range(part.num_parts))
        is_aligned = all(product(shape) % ALIGNMENT == 0 for shape in parts)
        return replace(spec, global_shape=part.shape, global_offset=part.offset, packed=packed, is_aligned=is_aligned)


class ParameterViews:
    """The views of a group's flat buffer that its parameters are, in slot order."""

    def __init__(self, flat: FlatBuffer, layout: Layout, parameters: list[nn.Parameter]) -> None:
        self._flat, self._layout, self.parameters = flat, layout, parameters
        self.tensors: list[Tensor] = []
        self.num_aliases = 0  # tensors that share the memory while no other code has a view: these and the flat buffer
        used = [index for index, slot in enumerate(layout.slots) if slot.numel]
        self.with_values = [parameters[index] for index in used]  # empty parameters have no address
        self._offsets = [layout.slots[index].offset * flat.tensor.itemsize for index in used]
        self.base, self.addresses = -1, list[int]()  # of the flat buffer, and of `with_values`
        # hash of the stored parameters, where they cannot be compared with the master weights at every step
        self.digest: Tensor | None = None
        self.masters_before: Tensor | None = None  # master weights while the user may overwrite their upper halves

    def make_view(self, index: int) -> Tensor:
        """Make a parameter a view of its slot; the first calls must be in slot order."""
        slot = self._layout.slots[index]
        view = self._flat.tensor.as_strided(slot.shape, slot.stride, slot.offset)
        self.tensors[index : index + 1] = [view]
        self.parameters[index].data = view
        return view

    def make_all(self) -> None:
        """Make all parameters views of the flat buffer, whose memory has changed."""
        self.tensors = []
        for index in range(len(self.parameters)):
            self.make_view(index)

    def find_addresses(self, base: int) -> None:
        """Compute the addresses that the parameters have where the flat buffer has the address `base`."""
        self.base, self.addresses = base, [base + offset for offset in self._offsets]

    def replaced(self) -> list[int]:
        """Return the indices of parameters that are no longer views of their slots.

        Released parameters must not go through `ReleasedParameter.__torch_function__` here.
        """
        found: list[int] = []
        with torch._C.DisableTorchFunctionSubclass():
            is_meta = self._flat.tensor.is_meta  # meta tensors have no memory to compare
            for index, (parameter, view) in enumerate(zip(self.parameters, self.tensors, strict=True)):
                if is_meta:
                    is_view = parameter.shape == view.shape
                else:
                    is_view = parameter.is_set_to(view) or not view.numel() + parameter.numel()
                if not is_view:
                    found.append(index)
        return found
