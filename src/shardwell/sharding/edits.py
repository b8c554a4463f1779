"""Values that were changed by hand: `p.data = x`, `p.data.copy_(x)`, `p.clamp_()`, `load_state_dict` of the module.

Parameters that rest whole are views of their group's flat buffer. One that was given other memory is looked for before
every forward, by its address, and before every step, by all that a view is: its values are taken over, and it is a
view again. What was changed in place is in the flat buffer already. Where the masters are a part of that, or its lower
halves, there is nothing to do. Where they rest apart they are compared with it when somebody opens them (`adopt`): an
element that is not its master's rounding was changed, and becomes the master. Masters on the host of parameters on a
GPU are compared when a sum of mixed bits (`digest`) says that something changed.

As in DDP, every rank is expected to change the same values in the same way.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardwell.errors import ModelChangedError
from shardwell.kernels.rounding import narrow
from shardwell.memory.device import AsyncScalar, Event
from shardwell.parallel import TrafficKind
from shardwell.sharding.layout import Slot

if TYPE_CHECKING:
    from shardwell.sharding.group import ShardedGroup
    from shardwell.sharding.unit import Unit

_SPAN = 1 << 17  # elements that are compared at once: they stay in a cache


@dataclass(frozen=True)
class ReplacedValues:
    """A parameter that is no view of its place any more."""

    unit: Unit
    group: ShardedGroup
    index: int  # in the group

    @property
    def slot(self) -> Slot:
        return self.group.layout.slots[self.index]

    @property
    def parameter(self) -> nn.Parameter:
        return self.group.parameters[self.index]

    @property
    def stretch(self) -> tuple[int, int, int]:
        """Which bytes of which storage it is: the storage, the first byte and the one behind the last."""
        data = self.parameter.data
        first = int(data.storage_offset()) * data.itemsize
        reach = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True)) + 1
        return data.untyped_storage()._cdata, first, first + reach * data.itemsize


def look(units: Sequence[Unit]) -> None:
    """Before a forward: 0.1 µs for each parameter."""
    with torch._C.DisableTorchFunctionSubclass():  # parameters that are away answer through a slow path
        are_there = all(group.places.begin_there() for unit in units for group in unit.groups)
    if not are_there:
        look_closely(units)


@torch.no_grad()
def look_closely(units: Sequence[Unit]) -> None:
    """Take over what was put in the place of parameters. Units with a parameter of another shape are misfits then."""
    found = [
        ReplacedValues(unit, group, index)
        for unit in units
        if unit.look is not None  # else it is being taken apart
        for group in unit.groups
        for index in group.places.left()
    ]
    if not found:
        return
    with torch._C.DisableTorchFunctionSubclass():
        fitting = [one for one in found if _fits(one)]
        _check_apart(fitting, units)
        values = [one.parameter.data.clone() for one in fitting]  # of each other's places, perhaps
        for one, value in zip(fitting, values, strict=True):
            one.group.take_in(one.index, value)


def look_before_step(units: Sequence[Unit]) -> None:
    """Take over what was put in the place of parameters since their gradients were made."""
    look_closely(units)
    for unit in units:
        unit.check_retention()
        if unit.misfit:
            raise ModelChangedError(
                f"a parameter of '{unit.name or '(root)'}' was given another shape between backward and step. Change "
                "the model after engine.step() or engine.zero_grad()."
            )


def _fits(one: ReplacedValues) -> bool:
    """Whether its values can be taken over; with another shape, its unit has to be built anew."""
    slot, data, place = one.slot, one.parameter.data, one.group.places.views[one.index]
    if one.group.context.device.is_meta:
        return False
    if tuple(data.shape) != slot.shape:
        one.unit.misfit = True
        return False
    if data.dtype != place.dtype or data.device != place.device:
        raise ModelChangedError(
            f"'{slot.name}' is {data.dtype} on {data.device} now, and the engine trains it as {place.dtype} on "
            f"{place.device}. Convert the model back before it is used, or set another precision in the configuration "
            "('bf16', 'fp16') and call engine.destroy() and initialize again."
        )
    if one.group.row.reshards:
        raise ModelChangedError(
            f"'{slot.name}' was given other values while it was whole for a moment, and they would be lost: each rank "
            f"holds only its shard of unit '{one.unit.name}'. Change it inside "
            "`with shardwell.zero.GatheredParameters(parameter, modifier_rank=0):`, or use engine.load_state_dict."
        )
    if one.unit.is_ahead:
        raise ModelChangedError(
            f"'{slot.name}' was given other values between backward and step, when its update had begun already. Set "
            '"shardwell": {"commit": "after_norm"}, or change it after the step.'
        )
    return True


def _check_apart(found: list[ReplacedValues], units: Sequence[Unit]) -> None:
    """Memory that two parameters share would be updated by both in plain PyTorch, and by none here."""
    replaced = {id(one.parameter) for one in found}
    storages = {group.flat.tensor.untyped_storage()._cdata: group for unit in units for group in unit.groups}
    taken = [(one.stretch, one.slot.name) for one in found if one.slot.numel]
    for storage in {stretch[0] for stretch, _ in taken} & set(storages):
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
    """At the end of a context that had a group whole: take in what was replaced; false if one has another shape.

    Those of another shape do not fit into the group any more; they are `source`'s for everyone.
    """
    fits = True
    for index in group.places.left():
        slot, parameter = group.layout.slots[index], group.parameters[index]
        if tuple(parameter.shape) == slot.shape:
            group.take_in(index, parameter.data)
            continue
        fits = False
        if source is not None:
            parameter.data = parameter.data.to(group.context.device.torch_device).contiguous()
            group.context.world.broadcast(parameter.data, source, TrafficKind.GATHER, f"WRITE {slot.name}")
    return fits


# ------------------------------------------------------------------------------------- masters that rest apart


def adopt(masters: Tensor, values: Tensor) -> None:
    """Masters (1D) become the values (1D, in the compute dtype, on the same device) that are not their roundings."""
    if masters.is_meta:
        return
    if masters.is_cuda:
        from shardwell.kernels.rounding_triton import adopt as kernel

        kernel(masters, values)
        return
    for start in range(0, masters.numel(), _SPAN):
        mine, theirs = masters[start : start + _SPAN], values[start : start + _SPAN]
        rounded = mine if mine.dtype == theirs.dtype else narrow(mine, torch.empty_like(theirs))
        if not torch.equal(rounded, theirs):
            mine.copy_(torch.where(rounded == theirs, mine, theirs.to(mine.dtype)))


def take_over_in_place(group: ShardedGroup, values: Tensor | None = None) -> None:
    """What was changed by hand becomes the truth; `values` are the parameters, if they were brought already."""
    if group.may_be_edited_apart:
        adopt(group.master, (group.at_rest if values is None else values).to(group.master.device))


def brought_down(group: ShardedGroup, after: Event) -> Tensor:
    """1D, on the host, the parameters as they rest once the device has got as far as `after`; waits for that."""
    with group.context.device.upload_stream.after(after):
        return group.at_rest.cpu()


def note_digest(group: ShardedGroup) -> None:
    """What rests on the device now is the rounding of masters below it, on the caller's lane."""
    if group.may_be_edited_apart and group.at_rest.is_cuda and not group.master.is_cuda:
        group.digest = digest(group.at_rest)


def digest(values: Tensor) -> Tensor:
    """A number that changes with any bit of `values` (1D, on a GPU), and with their order."""
    from shardwell.kernels.rounding_triton import digest as kernel

    return kernel(values)


def edits_of(groups: Iterable[ShardedGroup]) -> list[tuple[ShardedGroup, Callable[[], bool]]]:
    """Groups whose masters rest apart, and for who asks later whether their parameters may have been changed.

    On the host they are compared in any case: both are in its memory.
    """
    found: list[tuple[ShardedGroup, Callable[[], bool]]] = []
    for group in groups:
        if group.digest is not None:
            read = group.context.device.read_async(digest(group.at_rest) != group.digest)
            found.append((group, partial(_is_set, read)))
        elif group.may_be_edited_apart:
            found.append((group, lambda: True))
    return found


def _is_set(read: AsyncScalar) -> bool:
    return bool(read.get())


# ------------------------------------------------------------------------------- changes of what will be released


def versions(parameters: Iterable[nn.Parameter]) -> list[int]:
    """How often each was changed in place; what the engine does to their memory does not count."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_version, parameters))


_version: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]


def is_unlike_its_shard(group: ShardedGroup) -> bool:
    """Whether whole parameters are not what rests, where that is cheap to know. They were gathered as they rest."""
    shard = group.shard
    if shard is None or group.is_quantized or not group.is_exact or shard.page is not None or shard.tensor.is_meta:
        return False
    start, end = group.layout.shard_range(group.context.world.shard_index)
    mine = group.flat.tensor[start:end]
    if shard.tensor.device != mine.device:
        return False
    rounded = narrow(shard.tensor, torch.empty_like(mine)) if shard.tensor.dtype != mine.dtype else shard.tensor
    return not torch.equal(rounded.view(torch.uint8), mine.view(torch.uint8))


def warn_of_lost(unit: str, names: list[str]) -> None:
    logging.getLogger("shardwell").warning(
        "%s of unit '%s' changed in place while whole for a moment, and the change is lost: each rank holds only its "
        "shard. Change parameters inside `with shardwell.zero.GatheredParameters(parameters, modifier_rank=0):`, or "
        "use engine.load_state_dict; what a forward changes by itself belongs in a buffer.",
        ", ".join(f"'{name}'" for name in names) or "a parameter",
        unit or "(root)",
    )
