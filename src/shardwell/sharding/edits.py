"""Values that were changed by hand: `p.data = x`, `p.data.copy_(x)`, `p.clamp_()`, `module.load_state_dict`.

Parameters that stay unsharded are views of their group's flat buffer. A parameter that was given other memory is
detected before every forward, by its address, and before every step, by all properties of the view (`ModelFit` in
`runtime/hooks.py`): its values are copied back, and it is a view again. A change in place is in the flat
buffer already. Where the master weights are a slice of the flat buffer, or a remainder to it, nothing has to be done.
Separate master weights are compared with it when they are opened (`SeparateStorage.open`): an element that is not the
rounding of its master weight was changed, and becomes the master weight. Master weights on the host of parameters on a
GPU are compared only when a hash of all bits (`digest`) says that something changed.

As in DDP, every rank is expected to change the same values in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardwell.errors import ModelChangedError
from shardwell.kernels.rounding import adopt
from shardwell.memory import Event
from shardwell.memory.device import AsyncScalar
from shardwell.parallel import TrafficKind
from shardwell.sharding.layout import Slot

if TYPE_CHECKING:
    from shardwell.sharding.group import ShardedGroup
    from shardwell.sharding.unit import Unit


@dataclass(frozen=True)
class ReplacedValues:
    """A parameter that is no longer a view of its slot."""

    unit: Unit
    group: ShardedGroup
    index: int  # in the group

    @property
    def slot(self) -> Slot:
        """Return the slot of the parameter."""
        return self.group.layout.slots[self.index]

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter."""
        return self.group.parameters[self.index]

    @property
    def byte_range(self) -> tuple[int, int, int]:
        """Return the storage of the parameter, its first byte in it, and the byte behind its last."""
        data = self.parameter.data
        first = int(data.storage_offset()) * data.itemsize
        reach = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True)) + 1
        return data.untyped_storage()._cdata, first, first + reach * data.itemsize


@torch.no_grad()
def take_edits_closely(units: Sequence[Unit]) -> None:
    """Take over values of parameters that are no longer views; a unit with another shape becomes a misfit."""
    if not (found := _replaced(units)):
        return
    with torch._C.DisableTorchFunctionSubclass():
        fitting = [one for one in found if _fits(one)]
        _check_apart(fitting, units)
        _take_in(fitting)


@torch.no_grad()
def take_last_edits(units: Sequence[Unit]) -> None:
    """Take over values that replaced parameters since the last forward or step, before units are taken apart.

    Parameters that were moved to another device or dtype, as a library does after training, keep their master weights.
    """
    with torch._C.DisableTorchFunctionSubclass():
        _take_in([one for one in _replaced(units) if _is_alike(one) and not one.group.spec.reshards])


def _replaced(units: Sequence[Unit]) -> list[ReplacedValues]:
    return [
        ReplacedValues(unit, group, index)
        for unit in units
        if unit.owner is not None and not unit.changes.is_off
        for group in unit.groups
        for index in group.views.replaced()
    ]


def _take_in(found: Sequence[ReplacedValues]) -> None:
    values = [one.parameter.data.clone() for one in found]  # they may be views of each other's slots
    for one, value in zip(found, values, strict=True):
        one.group.take_in(one.index, value)


def _is_alike(one: ReplacedValues) -> bool:
    data, place = one.parameter.data, one.group.views.tensors[one.index]
    is_alike = data.dtype == place.dtype and data.device == place.device
    return is_alike and tuple(data.shape) == one.slot.shape and not data.is_meta


def take_edits_before_step(units: Sequence[Unit]) -> None:
    """Take over values that replaced parameters since their gradients were computed."""
    take_edits_closely(units)
    for unit in units:
        if unit.changes.was_retained:
            unit.check_retention()
        if unit.changes.needs_rebuild:
            raise ModelChangedError(
                f"a parameter of '{unit.name or '(root)'}' was given another shape between backward and step. Change "
                "the model after engine.step() or engine.zero_grad()."
            )


def _fits(one: ReplacedValues) -> bool:
    """Return whether the values can be taken over; with another shape, the unit has to be rebuilt."""
    slot, data, place = one.slot, one.parameter.data, one.group.views.tensors[one.index]
    if one.group.context.device.is_meta:
        return False
    if tuple(data.shape) != slot.shape:
        one.unit.changes.needs_rebuild = True
        return False
    if data.dtype != place.dtype or data.device != place.device:
        raise ModelChangedError(
            f"'{slot.name}' is {data.dtype} on {data.device} now, and the engine trains it as {place.dtype} on "
            f"{place.device}. Convert the model back before it is used, or set another precision in the configuration "
            "('bf16', 'fp16') and call engine.destroy() and initialize again."
        )
    if one.group.spec.reshards:
        raise ModelChangedError(
            f"'{slot.name}' was given other values while it was unsharded for a moment, and they would be lost: each "
            f"rank holds only its shard of unit '{one.unit.name}'. Change it inside "
            "`with shardwell.zero.GatheredParameters(parameter, modifier_rank=0):`, or use engine.load_state_dict."
        )
    if one.unit.updates.is_early:
        raise ModelChangedError(
            f"'{slot.name}' was given other values between backward and step, when its update had begun already. Set "
            '"shardwell": {"commit": "after_norm"}, or change it after the step.'
        )
    return True


def _check_apart(found: list[ReplacedValues], units: Sequence[Unit]) -> None:
    """Refuse parameters that share memory: plain PyTorch would update it through both, and a shard through neither."""
    replaced = {id(one.parameter) for one in found}
    storages = {group.flat.tensor.untyped_storage()._cdata: group for unit in units for group in unit.groups}
    taken = [(one.byte_range, one.slot.name) for one in found if one.slot.numel]
    for storage in {byte_range[0] for byte_range, _ in taken} & set(storages):
        group = storages[storage]
        size = group.flat.tensor.itemsize
        for slot, parameter in zip(group.layout.slots, group.parameters, strict=True):
            if id(parameter) not in replaced and slot.numel:
                taken.append(((storage, slot.offset * size, slot.end * size), slot.name))
    taken.sort()
    for (before, name), (after, other) in itertools.pairwise(taken):
        if before[0] == after[0] and after[1] < before[2]:
            raise ModelChangedError(
                f"'{name}' and '{other}' were made to share memory. Assign one parameter to both modules to tie them "
                "(a.weight = b.weight), or give each its own values (.clone())."
            )


def bring_home(group: ShardedGroup, source: int | None) -> bool:
    """Copy back replaced parameters when a context of unsharded parameters ends; false if a shape changed.

    Parameters of another shape do not fit into the group any more; the values of rank `source` are broadcast.
    """
    fits = True
    for index in group.views.replaced():
        slot, parameter = group.layout.slots[index], group.parameters[index]
        if tuple(parameter.shape) == slot.shape:
            group.take_in(index, parameter.data)
            continue
        fits = False
        if source is not None:
            parameter.data = parameter.data.to(group.context.device.torch_device).contiguous()
            group.context.roles.data.broadcast(parameter.data, source, TrafficKind.ALL_GATHER, f"WRITE {slot.name}")
    return fits


# ------------------------------------------------------------------------------------- separate master weights


def take_over_in_place(group: ShardedGroup, values: Tensor | None = None) -> None:
    """Write values that were changed by hand to the master weights; `values` are the parameters, if copied already."""
    if group.may_be_edited_apart:
        adopt(group.master, (group.storage.parameters if values is None else values).to(group.master.device))


def brought_down(group: ShardedGroup, after: Event) -> Tensor:
    """Return the stored parameters (1D, on the host) after the event `after`; waits for the copy."""
    with group.context.device.upload_stream.after(after):
        return group.storage.parameters.cpu()


def note_digest(group: ShardedGroup) -> None:
    """Record on the current stream that the parameters on the device are the rounding of master weights on the host."""
    has_gpu = group.context.device.has_streams
    if has_gpu and group.may_be_edited_apart and group.is_stored_on_device and group.is_stepped_on_host:
        group.views.digest = digest(group.storage.parameters)


def digest(values: Tensor) -> Tensor:
    """Return a number that changes with any bit of `values` (1D, on a GPU), and with their order."""
    from shardwell.kernels.rounding_triton import digest as kernel

    return kernel(values)


def edits_of(groups: Iterable[ShardedGroup]) -> list[tuple[ShardedGroup, Callable[[], bool]]]:
    """Return groups with separate master weights, each with a later test whether its parameters may have changed.

    On the host they are always compared, because both are in host memory.
    """
    found: list[tuple[ShardedGroup, Callable[[], bool]]] = []
    for group in groups:
        if group.context.device.is_meta:
            continue  # there are no values to edit
        if group.views.digest is not None:
            read = group.context.device.read_async(digest(group.storage.parameters) != group.views.digest)
            found.append((group, partial(_is_set, read)))
        elif group.may_be_edited_apart:
            found.append((group, lambda: True))
    return found


def _is_set(read: AsyncScalar) -> bool:
    return bool(read.get())
