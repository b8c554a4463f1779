"""The tensors that the inner optimizer steps: slices of this rank's master weights.

A slice covers as many parameters as possible, because a step over few long tensors is fast. It is split into its
parameters when they need different treatment: when one of them gets no gradient on any rank (plain PyTorch then leaves
it and its state unchanged), or is moved to another parameter group.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwell.errors import ShardwellError
from shardwell.kernels import Moment8bit
from shardwell.memory import Tier
from shardwell.optim.user_optimizer import NoGradientLeft
from shardwell.parallel import Collectives
from shardwell.sharding import ShardedGroup, Unit, released
from shardwell.sharding.layout import SlotPiece

_CHUNK = 1 << 22  # the least number of elements stepped in one call, if there are so many


@dataclass(frozen=True, eq=False)
class ParamSlice:
    """One tensor that the inner optimizer steps."""

    group: ShardedGroup
    label: int  # index of its parameter group
    start: int  # counted from the start of this rank's master weights
    tensor: Tensor  # 1D, a view of the group's master weights
    pieces: tuple[SlotPiece, ...]  # its parameters; `in_shard` counts from the start of this rank's master weights
    span: slice = field(init=False)  # its place in this rank's master weights, and in the averaged gradients

    def __post_init__(self) -> None:
        object.__setattr__(self, "span", slice(self.start, self.start + self.tensor.numel()))

    @property
    def gradient(self) -> Tensor | None:
        """Return a view (1D) of the group's averaged gradients; None if there are none."""
        result = self.group.gradients.result
        return None if result is None else result[self.span]

    @cached_property
    def no_gradient(self) -> NoGradientLeft:
        """Return the tensor that stands for the gradient and refuses every use."""
        return NoGradientLeft(self.tensor)

    def split(self) -> list[ParamSlice]:
        """Return one slice for each parameter."""
        return [
            replace(self, start=p.in_shard, tensor=self.group.slice_master(p.in_shard, p.numel), pieces=(p,))
            for p in self.pieces
        ]


class SliceStates(defaultdict[Tensor, Any]):
    """The optimizer state by slice; a lookup by parameter raises an error that names the function to use."""

    def __missing__(self, key: Tensor) -> Any:
        _refuse_parameters(key)
        return super().__missing__(key)

    def get(self, key: Tensor, default: Any = None) -> Any:
        """Return the state of a slice, or `default`; a parameter as key raises an error."""
        _refuse_parameters(key)
        return super().get(key, default)


def _refuse_parameters(key: Tensor) -> None:
    if isinstance(key, nn.Parameter) and released.is_owned(key):
        raise ShardwellError(
            "the optimizer's state is kept for this rank's shards, and not by parameter. For a parameter's state use "
            "shardwell.utils.safe_get_full_optimizer_state(parameter, name), on all ranks."
        )


class ParamSlices:
    """All slices of an engine on this rank."""

    def __init__(self, units: Sequence[Unit], *, one_per_parameter: bool) -> None:
        self.units = list(units)  # trainable units, in the order of the step
        self.chunks: list[list[Unit]] = []  # the units to step together; the same on every rank
        self.by_unit: dict[int, list[ParamSlice]] = {}
        self.groups: list[ShardedGroup] = []
        self._one_per_parameter = one_per_parameter
        self.numbers: dict[str, int] = {}  # parameter name -> its number, the same on every rank, in order of `groups`
        self.labels: dict[str, int] = {}  # parameter name -> its parameter group
        for unit in units:
            self._add(unit)
        self._number()

    def enter(self, unit: Unit) -> list[ParamSlice]:
        """Add the master weights of a unit."""
        self.units = sorted([*self.units, unit], key=lambda other: other.index)
        self._add(unit)
        self._number()
        return self.by_unit[unit.index]

    def _add(self, unit: Unit) -> None:
        found = [
            ParamSlice(group, run.label, run.start, group.slice_master(run.start, run.numel), run.pieces)
            for group in unit.trainable
            for run in group.spans
        ]
        if self._one_per_parameter:
            found = [part for shard in found for part in shard.split()]
        self.by_unit[unit.index] = found
        self.groups += unit.trainable
        self.labels.update({slot.name: slot.label for group in unit.trainable for slot in group.layout.slots})

    def leave(self, unit: Unit) -> list[ParamSlice]:
        """Remove the master weights of a unit."""
        self.units = [other for other in self.units if other is not unit]
        self.groups = [group for group in self.groups if group not in unit.trainable]
        self._number()
        return self.by_unit.pop(unit.index, [])

    def _number(self) -> None:
        names = (slot.name for group in self.groups for slot in group.layout.slots)
        self.numbers = {name: number for number, name in enumerate(names)}
        self.chunks = list(_chunks(self.units))

    def __iter__(self) -> Iterator[ParamSlice]:
        for shards in self.by_unit.values():
            yield from shards

    def of(self, unit: Unit) -> list[ParamSlice]:
        """Return the slices of a unit."""
        return self.by_unit[unit.index]

    def seen(
        self,
        unit: Unit,
        unseen: set[str],
        split: Callable[[Unit, ParamSlice], list[ParamSlice]],
        excluded: Container[ShardedGroup] = (),
    ) -> Iterator[ParamSlice]:
        """Yield the slices of a unit whose parameters have a gradient on any rank; one that has so in part is split.

        Parameters in `unseen` have none. Slices of `excluded` groups are left out, and are not split.
        """
        for shard in [shard for shard in self.by_unit[unit.index] if shard.group not in excluded]:
            are_unseen = [piece.slot.name in unseen for piece in shard.pieces]
            if not any(are_unseen):
                yield shard
            elif not all(are_unseen):
                for part in split(unit, shard):
                    if part.pieces[0].slot.name not in unseen:
                        yield part

    def part(self, unit: Unit, shard: ParamSlice, inner: Optimizer) -> list[ParamSlice]:
        """Split a slice into its parameters, together with its optimizer state."""
        if len(shard.pieces) == 1:
            return [shard]
        parts = shard.split()
        if shard.label >= 0:
            tensors = inner.param_groups[shard.label]["params"]
            at = next(i for i, tensor in enumerate(tensors) if tensor is shard.tensor)
            tensors[at : at + 1] = [part.tensor for part in parts]
        if shard.tensor in inner.state:
            state = inner.state.pop(shard.tensor)
            for part in parts:
                first = part.start - shard.start
                inner.state[part.tensor] = {
                    key: _part_of(value, shard.tensor, first, part.tensor.numel()) for key, value in state.items()
                }
        shards = self.by_unit[unit.index]
        at = shards.index(shard)
        shards[at : at + 1] = parts
        return parts

    def relabel(self, unit: Unit, parameter: nn.Parameter, label: int, inner: Optimizer) -> list[ParamSlice]:
        """Move this rank's slices of a parameter into another parameter group, and return them."""
        names = {
            slot.name
            for group in unit.groups
            for slot, candidate in zip(group.layout.slots, group.parameters, strict=True)
            if candidate is parameter
        }
        self.labels.update(dict.fromkeys(names & self.labels.keys(), label))
        moved = []
        for shard in list(self.of(unit)):
            if any(piece.slot.name in names for piece in shard.pieces):
                for part in self.part(unit, shard, inner):
                    if part.pieces[0].slot.name in names:
                        shards = self.by_unit[unit.index]
                        moved.append(replace(part, label=label))
                        shards[shards.index(part)] = moved[-1]
        return moved


def is_elementwise(value: Any, shard: ParamSlice) -> bool:
    """Return whether an entry of a slice's state has a value for each element."""
    return isinstance(value, Tensor | Moment8bit) and value.shape == shard.tensor.shape


def odd_keys(shards: Iterable[ParamSlice], state: Mapping[Any, dict[str, Any]]) -> set[str]:
    """Return the state entries that are not elementwise; slices of one element are ignored, as they cannot tell."""
    several = ((shard, state.get(shard.tensor, {})) for shard in shards if shard.tensor.numel() > 1)
    return {key for shard, mine in several for key, value in mine.items() if not is_elementwise(value, shard)}


def _part_of(value: Any, whole: Tensor, first: int, numel: int) -> Any:
    """Return the part of one state entry that belongs to a part of a slice."""
    if isinstance(value, Moment8bit):
        return value.copy_range(first, numel)
    if not isinstance(value, Tensor):
        return value
    return value[first : first + numel].clone() if value.shape == whole.shape else value.clone()


def chunk_lengths(numels: Iterable[int]) -> list[int]:
    """Return how many units are stepped together, for the elements that a rank steps of each unit in turn."""
    found, length, size = list[int](), 0, 0
    for numel in numels:
        length, size = length + 1, size + numel
        if size >= _CHUNK:
            found.append(length)
            length, size = 0, 0
    return [*found, length] if length else found


def _chunks(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    begin = 0
    for length in chunk_lengths(sum(group.local_numel for group in unit.trainable) for unit in units):
        yield list(units[begin : begin + length])
        begin += length


def scalar_state(inner: Optimizer, tensor: Tensor, before: Any, value: float) -> Any:
    """Return a scalar of a state as torch's optimizers keep it: a tensor, on the device for their fused kernels.

    An entry that was a Python number before stays one.
    """
    if before is not None and not isinstance(before, Tensor):
        return type(before)(value) if isinstance(before, int) else value
    on_device = inner.defaults.get("fused") or inner.defaults.get("capturable")
    dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    return torch.tensor(value, dtype=dtype, device=tensor.device if on_device else "cpu")


def check_cut(optimizer: Optimizer, given: Mapping[str, Any], world: Collectives) -> None:
    """Refuse a state of other tensors than the optimizer's, on all ranks if one rank has such a state.

    It may belong to the full parameters of plain PyTorch. Or it was saved when slices were split differently: they are
    split in the course of training, where only some of a slice's parameters get gradients.
    """
    groups = optimizer.param_groups
    now, then = ([len(group["params"]) for group in some] for some in (groups, given["param_groups"]))
    tensors = [tensor for group in groups for tensor in group["params"]]
    differs = now != then or any(
        _is_of_another(optimizer, tensor, given["state"].get(number, {})) for number, tensor in enumerate(tensors)
    )
    said = world.tell_all(bytes([differs]), "load_state_dict")
    if any(map(any, said)):
        mine = f"the {now} shards in each parameter group that the engine steps on this rank: it is of {then} tensors"
        whose = mine if differs else f"the shards that the engine steps on rank {[*map(any, said)].index(True)}"
        raise ShardwellError(
            f"this state is not of {whose}, whole parameters or shards that were cut otherwise. Use "
            "engine.save_checkpoint and engine.load_checkpoint, which know the parameters by name."
        )


def _is_of_another(optimizer: Optimizer, tensor: Tensor, given: Mapping[str, Any]) -> bool:
    """Return whether a state has other shapes than the optimizer's, or, without one, none of its tensor's shape."""
    own = optimizer.state.get(tensor, {})
    shapes = {name: value.shape for name, value in given.items() if isinstance(value, Tensor) and value.numel() > 1}
    if own:
        return any(isinstance(own.get(name), Tensor) and own[name].shape != shape for name, shape in shapes.items())
    return bool(shapes) and tensor.shape not in shapes.values()


def bytes_of_state(unit: Unit, shards: ParamSlices, state: Mapping[Tensor, dict[str, Any]]) -> Counter[Tier]:
    """Return the bytes of a unit's master weights and optimizer state on this rank, for every tier."""
    sizes: Counter[Tier] = Counter(dict.fromkeys(Tier, 0))
    for group in unit.groups:
        sizes.update(group.master_bytes())
    for shard in shards.of(unit):
        for value in list(state.get(shard.tensor, {}).values()):  # a worker thread may be changing it
            if isinstance(value, Tensor | Moment8bit):
                sizes[shard.group.spec.optimizer.tier] += value.nbytes
    return sizes
