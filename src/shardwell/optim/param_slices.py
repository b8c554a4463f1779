"""The tensors that the inner optimizer steps: stretches of this rank's masters.

A stretch covers as many parameters as possible, because a step over few long tensors is fast. It is cut into its
parameters when their lives part: when one of them gets no gradient on any rank (plain PyTorch then leaves it and its
state alone), or joins another parameter group.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwell.errors import ShardwellError
from shardwell.kernels import Moment8bit
from shardwell.memory import Tier
from shardwell.optim.user_optimizer import NoGradientLeft
from shardwell.parallel import Collectives
from shardwell.sharding import ShardedGroup, Unit, released
from shardwell.sharding.layout import SlotPiece

_CHUNK = 1 << 22  # elements stepped in one call, at least, if there are so many


@dataclass(frozen=True, eq=False)
class ParamSlice:
    """One tensor that the inner optimizer steps."""

    group: ShardedGroup
    label: int  # its parameter group
    start: int  # counted from the start of this rank's masters
    tensor: Tensor  # 1D, a view of the group's masters
    pieces: tuple[SlotPiece, ...]  # the parameters in it; `in_shard` counts from the start of this rank's masters

    @property
    def gradient(self) -> Tensor | None:
        """1D, a view of the group's averaged gradients; None if nothing arrived."""
        result = self.group.gradients.result
        return None if result is None else result[self.start : self.start + self.tensor.numel()]

    @cached_property
    def no_gradient(self) -> NoGradientLeft:
        return NoGradientLeft(self.tensor)

    def hang_gradient(self, factor: Tensor | float | None, *, again: bool) -> bool:
        """Make the gradient that of the tensor, in its dtype, times a factor; false if there is none.

        `again`: it may be wanted once more, as it is.
        """
        gradient = self.gradient
        if gradient is None:
            return False
        gradient = gradient.to(self.tensor)
        if factor is not None:
            factor = factor.to(gradient) if isinstance(factor, Tensor) else factor
            gradient = gradient * factor if again else gradient.mul_(factor)
        self.tensor.grad = gradient
        return True

    def cut(self) -> list[ParamSlice]:
        """One shard for each parameter."""
        return [
            replace(self, start=p.in_shard, tensor=self.group.slice_master(p.in_shard, p.numel), pieces=(p,))
            for p in self.pieces
        ]


class SliceStates(defaultdict[Tensor, Any]):
    """An optimizer's state by shard. Who asks for that of a parameter is told where it is."""

    def __missing__(self, key: Tensor) -> Any:
        _refuse_parameters(key)
        return super().__missing__(key)

    def get(self, key: Tensor, default: Any = None) -> Any:
        _refuse_parameters(key)
        return super().get(key, default)


def _refuse_parameters(key: Tensor) -> None:
    if isinstance(key, nn.Parameter) and released.is_owned(key):
        raise ShardwellError(
            "the optimizer's state is kept for this rank's shards, and not by parameter. For a parameter's state use "
            "shardwell.utils.safe_get_full_optimizer_state(parameter, name), on all ranks."
        )


class ParamSlices:
    """All shards of an engine on this rank."""

    def __init__(self, units: Sequence[Unit], *, one_per_parameter: bool) -> None:
        self._by_unit: dict[int, list[ParamSlice]] = {}
        self._groups: list[ShardedGroup] = []
        self._one_per_parameter = one_per_parameter
        self.numbers: dict[str, int] = {}  # parameter name -> its number, the same on every rank
        self.labels: dict[str, int] = {}  # parameter name -> its parameter group
        for unit in units:
            self.enter(unit)

    def enter(self, unit: Unit) -> list[ParamSlice]:
        """Take in the masters of a unit."""
        found = [
            ParamSlice(group, run.label, run.start, tensor, run.pieces)
            for group in unit.trainable
            for run, tensor in group.spans
        ]
        if self._one_per_parameter:
            found = [part for shard in found for part in shard.cut()]
        self._by_unit[unit.index] = found
        self._groups += unit.trainable
        self.labels.update({slot.name: slot.label for group in unit.trainable for slot in group.layout.slots})
        self._number()
        return found

    def leave(self, unit: Unit) -> list[ParamSlice]:
        """Forget the masters of a unit."""
        self._groups = [group for group in self._groups if group not in unit.trainable]
        self._number()
        return self._by_unit.pop(unit.index, [])

    def _number(self) -> None:
        names = (slot.name for group in self._groups for slot in group.layout.slots)
        self.numbers = {name: number for number, name in enumerate(names)}

    def __iter__(self) -> Iterator[ParamSlice]:
        for shards in self._by_unit.values():
            yield from shards

    def of(self, unit: Unit) -> list[ParamSlice]:
        return self._by_unit[unit.index]

    def hang_no_gradients(self, there_are_some: bool) -> None:
        """Whoever looks for gradients at these tensors is told where they are, while there are some."""
        for shard in self:
            shard.tensor.grad = shard.no_gradient if there_are_some else None

    def seen(self) -> list[bool]:
        """For each parameter, by number: whether this rank has a gradient of it."""
        return [seen for group in self._groups for seen in group.gradients.seen]

    def part(self, unit: Unit, shard: ParamSlice, inner: Optimizer) -> list[ParamSlice]:
        """Cut a shard into its parameters, and its optimizer state with it."""
        if len(shard.pieces) == 1:
            return [shard]
        parts = shard.cut()
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
        shards = self._by_unit[unit.index]
        at = shards.index(shard)
        shards[at : at + 1] = parts
        return parts

    def relabel(self, unit: Unit, parameter: nn.Parameter, label: int, inner: Optimizer) -> list[ParamSlice]:
        """Move a parameter's shards on this rank into another parameter group; returns them."""
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
                        shards = self._by_unit[unit.index]
                        moved.append(replace(part, label=label))
                        shards[shards.index(part)] = moved[-1]
        return moved


def is_elementwise(value: Any, shard: ParamSlice) -> bool:
    """Whether an entry of a shard's state has a number for each element."""
    return isinstance(value, Tensor | Moment8bit) and value.shape == shard.tensor.shape


def odd_keys(shards: Iterable[ParamSlice], state: Mapping[Any, dict[str, Any]]) -> set[str]:
    """The entries of states that are not elementwise, by shards of several elements: those of one cannot tell."""
    several = ((shard, state.get(shard.tensor, {})) for shard in shards if shard.tensor.numel() > 1)
    return {key for shard, mine in several for key, value in mine.items() if not is_elementwise(value, shard)}


def _part_of(value: Any, whole: Tensor, first: int, numel: int) -> Any:
    """A part's share of one entry of a shard's state."""
    if isinstance(value, Moment8bit):
        return value.cut(first, numel)
    if not isinstance(value, Tensor):
        return value
    return value[first : first + numel].clone() if value.shape == whole.shape else value.clone()


def chunks(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Units to step together; the same on every rank."""
    chunk: list[Unit] = []
    size = 0
    for unit in units:
        chunk.append(unit)
        size += sum(group.own[1] - group.own[0] for group in unit.trainable)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def check_cut(optimizer: Optimizer, given: Mapping[str, Any], world: Collectives) -> None:
    """Refuse a state that is of other tensors than the optimizer's, on all ranks if one has such a one.

    It may be of plain PyTorch's whole parameters. Or it was taken when shards were cut otherwise: they are cut in the
    course of training, where only some of a shard's parameters get gradients.
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
    """Whether a state has other shapes than the optimizer's own, or, if it has none yet, nothing of its tensor's."""
    own = optimizer.state.get(tensor, {})
    shapes = {name: value.shape for name, value in given.items() if isinstance(value, Tensor) and value.numel() > 1}
    if own:
        return any(isinstance(own.get(name), Tensor) and own[name].shape != shape for name, shape in shapes.items())
    return bool(shapes) and tensor.shape not in shapes.values()


def bytes_of_state(unit: Unit, shards: ParamSlices, state: Mapping[Tensor, dict[str, Any]]) -> Counter[Tier]:
    """Of a unit's masters and optimizer state on this rank, by tier: all tiers."""
    sizes: Counter[Tier] = Counter(dict.fromkeys(Tier, 0))
    for group in unit.groups:
        sizes.update(group.master_bytes())
    for shard in shards.of(unit):
        for value in list(state.get(shard.tensor, {}).values()):  # a worker may be changing it
            if isinstance(value, Tensor | Moment8bit):
                sizes[shard.group.row.optimizer.tier] += value.nbytes
    return sizes
