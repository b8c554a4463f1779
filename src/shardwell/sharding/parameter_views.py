"""The parameters of a group as views of its flat buffer, and whether the user has replaced or changed them.

This file detects changes at a low cost, in every step. What follows from a change is in `edits.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardwell.kernels.rounding import narrow
from shardwell.memory import FlatBuffer, Tier
from shardwell.sharding.layout import Layout, TensorSpec
from shardwell.sharding.tensor_part import part_of

if TYPE_CHECKING:
    from shardwell.sharding.group import ShardedGroup
    from shardwell.sharding.unit import Unit


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
        if part is None or part.blocks:
            return spec
        return replace(spec, global_shape=part.shape, global_offset=part.offset)


class ParameterViews:
    """The views of a group's flat buffer that its parameters are, in slot order."""

    def __init__(self, flat: FlatBuffer, layout: Layout, parameters: list[nn.Parameter]) -> None:
        self._flat, self._layout, self.parameters = flat, layout, parameters
        self.tensors: list[Tensor] = []
        self.num_aliases = 0  # tensors that share the memory while no other code has a view: these and the flat buffer
        used = [index for index, slot in enumerate(layout.slots) if slot.numel]  # empty ones have no address
        self._used = [parameters[index] for index in used]
        self._offsets = [layout.slots[index].offset * flat.tensor.itemsize for index in used]
        self._addresses: tuple[int, list[int]] = (-1, [])  # of the flat buffer, and of its parameters
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
            for index, (parameter, view) in enumerate(zip(self.parameters, self.tensors, strict=True)):
                if is_meta:
                    is_view = parameter.shape == view.shape
                else:
                    is_view = parameter.is_set_to(view) or not view.numel() + parameter.numel()
                if not is_view:
                    found.append(index)
        return found


_CLOSE_LOOKS = 4  # reshards that compare values: a forward that changes its own parameters does so from the start

_version: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]


class ChangeWatch:
    """Finds changes of a unit's parameters: of their shapes, and of values that are lost when their memory is freed."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._has_warned = False
        self.is_off = False  # the parameters get another owner: what happens to them is no edit of the user
        self.gathered_at = 0  # the number of the unit's updates at its all-gather
        self.is_rounded = False  # the all-gather was quantised
        self.was_retained = False  # since its all-gather
        self.was_opened = False  # since its all-gather, by a context: the user may have views of it
        self.has_warned_of_views = False
        self.needs_rebuild = False  # a parameter was given another shape
        self._num_looks = 0  # reshards; the first `_CLOSE_LOOKS` of them compare values
        self.reset(parameters)

    def reset(self, parameters: list[nn.Parameter]) -> None:
        """Expect the parameters to stay as they are now."""
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = list(map(_version, parameters))  # how often each was changed in place by the user

    def check(self, unit: Unit, *, closely: bool | None = None) -> None:
        """Warn if unsharded parameters were changed in place, because the change is lost when they are freed.

        Torch does not count changes of `p.data`. `closely`: values are compared with the stored ones. By default this
        is done where a change is likely, and the unit is about to be resharded.
        """
        if closely is None:
            closely = self.was_retained or self._num_looks < _CLOSE_LOOKS
            self._num_looks, self.was_retained = self._num_looks + 1, False
        with torch._C.DisableTorchFunctionSubclass():
            now = list(map(_version, unit.sets.parameters))
        is_lost = closely and self._differs(unit)
        if (is_lost or now != self._versions) and not self._has_warned:
            self._warn(unit, now, is_lost=is_lost)
        self._versions = now

    def _differs(self, unit: Unit) -> bool:
        """Whether values differ from the stored ones, and only the user can have changed them."""
        is_updated = unit.updates.count != self.gathered_at or unit.updates.is_ahead or unit.updates.pending is not None
        if is_updated or not unit.is_unsharded:
            return False
        return any(is_unlike_its_shard(group) for group in unit.resharding_groups)

    def _warn(self, unit: Unit, now: list[int], *, is_lost: bool) -> None:
        """Warn once, with the names of the parameters that were changed and will be freed."""
        slots = [slot for group in unit.groups for slot in group.layout.slots]
        freed = {id(slot) for group in unit.resharding_groups for slot in group.layout.slots}
        changed = zip(slots, now, self._versions, strict=True)
        names = [slot.name for slot, after, before in changed if after != before and id(slot) in freed]
        if names or is_lost:
            self._has_warned = True
            warn_of_lost(unit.name, names)


def is_unlike_its_shard(group: ShardedGroup) -> bool:
    """Whether unsharded parameters differ from the stored ones, where that is cheap to know.

    The parameters must have been all-gathered unquantised.
    """
    stored, mine = group.storage.parameters, group.flat.tensor[slice(*group.local_range)]
    is_on_disk = group.spec.parameters.tier is Tier.DISK
    if group.is_quantized or not group.all_gather.is_exact or is_on_disk or stored.is_meta:
        return False
    if stored.device != mine.device:
        return False
    rounded = narrow(stored, torch.empty_like(mine)) if stored.dtype != mine.dtype else stored
    return not torch.equal(rounded.view(torch.uint8), mine.view(torch.uint8))


def warn_of_lost(unit: str, names: list[str]) -> None:
    """Warn that a change in place of parameters of this unit is lost."""
    logging.getLogger("shardwell").warning(
        "%s of unit '%s' changed in place while unsharded for a moment, and the change is lost: each rank holds only "
        "its shard. Change parameters inside `with shardwell.zero.GatheredParameters(parameters, modifier_rank=0):`, "
        "or use engine.load_state_dict; what a forward changes by itself belongs in a buffer.",
        ", ".join(f"'{name}'" for name in names) or "a parameter",
        unit or "(root)",
    )
