"""Access to one parameter's master weights, gradient and optimizer state, in full or this rank's part.

Reading something in full is collective: all ranks must ask for the same things in the same order.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.kernels import Moment8bit
from shardwell.kernels.rounding import narrow
from shardwell.optim.odd_state import KeptEntries, is_usual, state_from_json, state_to_json
from shardwell.optim.param_slices import ParamSlice, is_elementwise, odd_keys
from shardwell.optim.unit_optimizer import optimizer_of
from shardwell.parallel import TrafficKind
from shardwell.sharding import Residency, ShardedGroup, Unit, released
from shardwell.sharding.gradients import gone
from shardwell.sharding.layout import Slot, SlotPiece, product

_NOTHING, _NUMBER, _PART, _ODD = 0.0, 1.0, 2.0, 3.0  # what a rank has of a state entry
READ_TOGETHER = 1 << 18  # elements of small parameters that are read by one collective


class ParamAccess:
    """A parameter of an engine's model, read and written through its shards."""

    def __init__(self, parameter: nn.Parameter, *, of_gradient: bool = False) -> None:
        """Locate the parameter; with `of_gradient`, values that were changed by hand are not taken over."""
        owner = released.owner_of(parameter) if released.is_owned(parameter) else None
        if not isinstance(owner, Unit):
            raise ShardwellError("this parameter does not belong to a model that was given to initialize")
        self._unit = owner
        if not of_gradient:
            owner.take_over_edits()
        self._group, self._slot = _locate(owner, parameter)
        self._index = self._group.layout.slots.index(self._slot)
        self._piece = self._own_piece()

    def take_over_gradients(self) -> None:
        """Take over the user's changes of `p.grad`, unless a backward runs."""
        if self._unit.owner is not None and torch._C._current_graph_task_id() == -1:
            self._unit.owner.take_gradient_edits()

    def _own_piece(self) -> SlotPiece | None:
        """Return this rank's part; `in_shard` counts from the start of this rank's master weights."""
        return next((p for run in self._group.spans for p in run.pieces if p.slot.name == self._slot.name), None)

    # -------------------------------------------------------------------------------------------- master weights

    def master(self) -> Tensor:
        """Return the full master weights (ND), or the values that an optimizer would step."""
        self._unit.wait()
        with self._group.storage.open():
            return self._assemble(self._group.precision.master, self._part(self._group.master))

    def assembled(self, mine: Tensor) -> Tensor:
        """Return a full tensor (ND) from data with the layout of master weights, `mine` on this rank."""
        return self._assemble(mine.dtype, self._part(mine))

    def local_master(self) -> Tensor | None:
        """Return this rank's part of the master weights (1D); None if it has none."""
        self._unit.wait_local_update()
        with self._group.storage.open():
            part = self._part(self._group.master)
            return None if part is None else part.clone()

    def set_master(self, value: Tensor) -> None:
        """Set the master weights, and the parameter if it is unsharded. Every rank passes the same values."""
        self._unit.wait()
        wide = self._flat_of(value, self._group.precision.master)
        with self._group.storage.open(changes=True):
            part = self._part(self._group.master)
            if part is not None and self._piece is not None:
                part.copy_(self._slice(wide))
                self._group.note_changed_master(self._piece.in_shard, part)
        self._group.invalidate_secondary()
        if self._group.flat.present:
            narrow(wide, self._group.flat.tensor[self._slot.offset : self._slot.end])
        self._group.regather_quantized()

    def set_local_master(self, value: Tensor) -> None:
        """Set this rank's part of the master weights; only where no other rank has a copy of it."""
        if not self._group.spec.reshards or self._group.stays_unsharded:
            raise ShardwellError(
                f"'{self._slot.name}' is stored unsharded on every rank, and the others would not see a change of this "
                "rank's part: use safe_set_full_fp32_param."
            )
        self._unit.wait_local_update()
        if self._unit.residency is Residency.UNSHARDING:
            self._unit.wait()  # else the all-gather would bring the old values
        if self._group.has_secondary:
            raise ShardwellError(
                f"of '{self._slot.name}' there is a secondary shard in each node (zero_hpz_partition_size), and the "
                "others would not see a change of this rank's part: use safe_set_full_fp32_param, or change it after a "
                "step, before the next forward."
            )
        with self._group.storage.open(changes=True):
            part = self._part(self._group.master)
            if part is not None:
                part.copy_(value.reshape(-1))

    # ------------------------------------------------------------------------------------------------- gradients

    def gradient(self, *, asks: bool = True) -> Tensor | None:
        """Return the full gradient (ND) without the loss scale; None between a step and a backward.

        It is averaged over ranks and micro-steps, in a copy: sums that are not averaged yet stay so, and no update
        starts. `asks`: ranks may differ in what they have, so they exchange that first.
        """
        if not self._is_trained:
            return None
        if not asks:
            self._tell()
        has_any, has_sums = self._anywhere() if asks else (self._group.gradients.has_any, False)
        if not has_any:
            return None
        gradients = self._group.gradients
        part = self._part(gradients.snapshot(has_sums=has_sums))
        return self._assemble(gradients.reduced.wide, None if part is None else part / self.loss_scale)

    def gradient_part(self, *, asks: bool) -> Tensor | None:
        """Return this rank's part of the averaged gradient (1D), to read, with the loss scale; None if it has none.

        `asks` as for `gradient`. All ranks must call it.
        """
        if not asks:
            result = self._averaged()
            return None if result is None else self._part(result)
        has_any, has_sums = self._anywhere()
        return self._part(self._group.gradients.snapshot(has_sums=has_sums)) if has_any else None

    @contextlib.contextmanager
    def open_gradient(self, *, asks: bool) -> Iterator[Tensor | None]:
        """Yield this rank's part of the averaged gradient (1D) without the loss scale, to be changed, or None.

        `asks` as for `gradient`. All ranks must call it.
        """
        if asks and self._anywhere()[1] and self._unit.owner is not None:
            self._unit.owner.reduce_now(self._unit)
        result = self._averaged()
        if result is not None and self._unit.optimizer is not None:
            optimizer_of(self._unit).executor.gradients_change(self._unit)
        part = None if result is None else self._part(result)
        scale = self.loss_scale
        if part is None or scale == 1.0:
            yield part
            return
        wide = part.to(self._group.gradients.reduced.wide) / scale  # in 16 bits it would be rounded without the scale
        try:
            yield wide
        finally:
            part.copy_(wide * scale)

    def part_of(self, value: Tensor) -> Tensor:
        """Return this rank's part (1D) of a tensor that broadcasts to the parameter's shape; it may be empty."""
        flat = self._flat_of(value.expand(self._slot.shape), value.dtype)
        return flat[:0] if self._piece is None else self._slice(flat)

    def argument(self, value: Any) -> Any:
        """Convert an operand of an operation on the full gradient to one for this rank's part."""
        is_one = not isinstance(value, Tensor) or value.ndim == 0
        return value if is_one else self.part_of(value)

    def _slice(self, flat: Tensor) -> Tensor:
        assert self._piece is not None
        return flat[self._piece.in_parameter : self._piece.in_parameter + self._piece.numel]

    def local_gradient(self) -> Tensor | None:
        """Return this rank's part of the gradient (1D), as far as this rank can know it without a collective."""
        self._check_alone()
        if not self._is_trained or not self._group.gradients.has_any:
            return None
        self._tell()
        part = self._part(self._group.gradients.snapshot(has_sums=False))
        return None if part is None else part / self.loss_scale

    def set_gradient(self, value: Tensor) -> None:
        """Set the full gradient. Every rank passes the same values."""
        with self.open_gradient(asks=self._is_trained) as part:
            if not self._is_trained or self._group.gradients.result is None:
                raise ShardwellError(f"'{self._slot.name}' has no gradient that could be changed: call backward first")
            mine = self.part_of(self._checked(value).to(self._group.gradients.reduced.wide))
            self._group.gradients.has_gradient[self._index] = True
            if part is not None:
                part.copy_(mine)

    def set_local_gradient(self, value: Tensor) -> None:
        """Set this rank's part of the averaged gradient, without a collective."""
        self._check_alone()
        result = self._averaged()
        part = None if result is None else self._part(result)
        if part is not None:
            if self._unit.optimizer is not None:
                optimizer_of(self._unit).executor.gradients_change(self._unit)
            part.copy_(value.reshape(-1).to(part.device, torch.float32) * self.loss_scale)

    @property
    def _is_trained(self) -> bool:
        return self._group.trainable

    def _tell(self) -> None:
        """Record that the unit's gradients are read or changed."""
        if self._unit.optimizer is not None:
            optimizer_of(self._unit).executor.gradients_read(self._unit)

    @property
    def _waits(self) -> bool:
        """Whether gradients wait to be averaged, also those of other groups if this rank has none of this one."""
        return any(group.gradients.is_partial for group in self._unit.trainable)

    def _anywhere(self) -> tuple[bool, bool]:
        """Return whether any rank has gradients, and whether some wait to be averaged. All ranks must call it."""
        self._tell()
        gradients, device = self._group.gradients, self._group.context.device
        gradients.wait()
        flags = [gradients.has_any and gradients.has_gradient[self._index], self._waits, gradients.reduced.is_discarded]
        if not device.is_meta:
            total = torch.tensor(flags, dtype=torch.float64, device=device.torch_device)
            self._group.context.roles.data.all_reduce_sum(total, f"READ {self._slot.name} gradient")
            flags = [number > 0 for number in total.tolist()]
        if flags[2]:
            gone()
        return flags[0], flags[1]

    def _averaged(self) -> Tensor | None:
        """Return this rank's part of the averaged gradients of the group (1D), not a copy."""
        if not self._is_trained:
            return None
        self._tell()
        gradients = self._group.gradients
        gradients.wait()
        if gradients.reduced.accumulates_elsewhere and self._unit.optimizer is not None:
            optimizer_of(self._unit).executor.reduced(self._unit, at_boundary=False)
        gradients.reduced.ensure_readable()
        return gradients.result

    def _check_alone(self) -> None:
        """Raise an error if the gradient is not averaged yet, because averaging needs all ranks."""
        if self._is_trained and (self._waits or self._group.gradients.needs_collective):
            when = " (that is done at the boundary)" if self._waits else ""
            raise ShardwellError(
                f"the gradient of '{self._slot.name}' is not averaged over the ranks yet{when}, and one rank cannot do "
                "that alone: call safe_get_full_grad or safe_set_full_grad on all ranks."
            )

    @property
    def loss_scale(self) -> float:
        """Return the loss scale of the gradient."""
        if self._unit.optimizer is None:
            return float(self._group.gradients.loss_scale)
        return float(optimizer_of(self._unit).scale.value)

    # ----------------------------------------------------------------------------------------------------- state

    def local_state(self) -> dict[str, Any]:
        """Return this rank's part of the optimizer state by name: tensors (1D), to read, and scalars."""
        self._unit.wait_local_update()
        shard = self._shard()
        if shard is None or self._piece is None:
            return {}
        first = self._piece.in_shard - shard.start
        with optimizer_of(self._unit).states_of(self._unit):
            return {
                key: value[first : first + self._piece.numel] if is_elementwise(value, shard) else value
                for key, value in optimizer_of(self._unit).state.get(shard.tensor, {}).items()
            }

    def state(self, key: str) -> Any:
        """Return one state entry: a full tensor (ND), a number or another value; None if no rank has it."""
        found = self._state(key)
        return found.value if isinstance(found, KeptEntries) else found

    def _state(self, key: str) -> Any:
        """Return one state entry; a value that is neither a full tensor nor a number is in `KeptEntries`."""
        local = self.local_state()
        shard = self._group.context.roles.shard
        where = self._group.context.device.torch_device
        has = torch.zeros(shard.rank_group.size, dtype=torch.float64, device=where)
        has[shard.rank_group.rank] = kind = self._kind_of(local, key)
        shard.all_reduce_sum(has, f"READ {self._slot.name} {key}")
        if not bool(has.any()):
            return None
        value: Any = local.get(key)
        if bool((has == _ODD).any()):  # before parts: a part of one element cannot be told from a scalar
            text = json.dumps(state_to_json(value, None, f"{self._slot.name}: {key}")) if kind == _ODD else ""
            told = self._share_text(text, int((has == _ODD).int().argmax()), key)
            return KeptEntries(state_from_json(json.loads(told), where, f"{self._slot.name}: {key}"))
        if bool((has == _PART).any()):
            return self._assemble(self._group.precision.master, value if kind == _PART else None)
        scalar = self._group.context.device.scalar(0.0, torch.float64)
        if kind:
            scalar.fill_(float(value))
        shard.broadcast(scalar, int(has.argmax()), TrafficKind.ALL_GATHER, f"READ {self._slot.name} {key}")
        return float(scalar)

    def _kind_of(self, local: dict[str, Any], key: str) -> float:
        if key not in local or self._piece is None:
            return _NOTHING
        optimizer, shard = optimizer_of(self._unit), self._shard()
        assert shard is not None
        is_each = is_elementwise(optimizer.state[shard.tensor][key], shard)
        if is_each and (shard.tensor.numel() > 1 or key not in odd_keys(optimizer.shards, optimizer.state)):
            return _PART
        return _NUMBER if is_usual(local[key], optimizer.scalar(shard.tensor, None, 0.0)) else _ODD

    def _share_text(self, text: str, source: int, what: str) -> str:
        """Broadcast a text of one rank."""
        shard = self._group.context.roles.shard
        where = self._group.context.device.torch_device
        mine = text.encode()
        size = torch.tensor([len(mine)], dtype=torch.int64, device=where)
        shard.broadcast(size, source, TrafficKind.ALL_GATHER, f"READ {self._slot.name} {what}")
        letters = torch.zeros(int(size), dtype=torch.uint8, device=where)
        if shard.rank_group.rank == source and mine:
            letters.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        shard.broadcast(letters, source, TrafficKind.ALL_GATHER, f"READ {self._slot.name} {what}")
        return bytes(letters.tolist()).decode()

    def states(self) -> dict[str, Any]:
        """Return the full state, for `set_state`. Its names must be the same on all ranks that have a part."""
        shard = self._group.context.roles.shard
        where = self._group.context.device.torch_device
        names = "\n".join(sorted(self.local_state()))
        size = torch.zeros(shard.rank_group.size, dtype=torch.float64, device=where)
        size[shard.rank_group.rank] = len(names.encode())
        shard.all_reduce_sum(size, f"READ {self._slot.name} names")
        if not bool(size.any()):
            return {}
        told = self._share_text(names, int(size.argmax()), "names")
        with optimizer_of(self._unit).states_of(self._unit):
            return {key: self._state(key) for key in told.split("\n")}

    def set_state(self, key: str, value: Any) -> None:
        """Set one state entry; a tensor has the full shape. Every rank passes the same values."""
        shard = self._shard()
        if shard is None or self._piece is None:
            return
        before = optimizer_of(self._unit).state.get(shard.tensor, {}).get(key)
        is_count = isinstance(before, Tensor) and before.ndim == 0
        if isinstance(value, Tensor) and (value.ndim or (self._slot.shape == () and not is_count)):
            flat = self._flat_of(value, self._group.precision.master)
            value = self._slice(flat)
        self.set_local_state(key, value)

    def set_local_state(self, key: str, value: Any) -> None:
        """Set this rank's part of one state entry."""
        shard = self._shard()
        if shard is None or self._piece is None:
            return
        self._unit.wait_local_update()
        with optimizer_of(self._unit).states_of(self._unit, changes=True):
            shard = optimizer_of(self._unit).alone(self._unit, shard, self._slot.name)
            state = optimizer_of(self._unit).state[shard.tensor]
            if isinstance(value, KeptEntries):
                state[key] = copy.deepcopy(value.value)
            elif not isinstance(value, Tensor) or value.ndim == 0:
                state[key] = optimizer_of(self._unit).scalar(shard.tensor, state.get(key), float(value))
            elif isinstance(state.get(key), Tensor | Moment8bit):
                state[key].copy_(value)
            else:
                wide = {**state, key: value.to(shard.tensor, copy=True)}
                optimizer_of(self._unit).state[shard.tensor] = optimizer_of(self._unit).executor.pack_state(shard, wide)

    def _shard(self) -> ParamSlice | None:
        if self._unit.optimizer is None or not self._group.trainable:
            return None
        shards = optimizer_of(self._unit).shards.of(self._unit)
        return next((s for s in shards if any(p.slot.name == self._slot.name for p in s.pieces)), None)

    # --------------------------------------------------------------------------------------------------- helpers

    def _part(self, mine: Tensor) -> Tensor | None:
        """Return the parameter's part (1D) of data with the layout of this rank's master weights."""
        return None if self._piece is None else mine[self._piece.in_shard : self._piece.in_shard + self._piece.numel]

    def _assemble(self, dtype: torch.dtype, part: Tensor | None) -> Tensor:
        """Return the full tensor (ND) from the parts of all ranks."""
        group, slot, shard = self._group, self._slot, self._group.context.roles.shard
        flat = group.context.device.empty(slot.numel, dtype)
        if group.spec.optimizer.axis is None:
            assert part is not None or slot.numel == 0
            if part is not None:
                flat.copy_(part)
            return flat.as_strided(slot.shape, slot.stride)
        for rank in range(shard.rank_group.size):
            for piece in group.layout.pieces(shard.shard_index_of(rank)):
                if piece.slot is slot:
                    view = flat[piece.in_parameter : piece.in_parameter + piece.numel]
                    if rank == shard.rank_group.rank and part is not None:
                        view.copy_(part)
                    shard.broadcast(view, rank, TrafficKind.ALL_GATHER, f"READ {slot.name}")
        return flat.as_strided(slot.shape, slot.stride)

    def _checked(self, value: Tensor) -> Tensor:
        if tuple(value.shape) != self._slot.shape:
            raise ShardwellError(
                f"'{self._slot.name}' has shape {self._slot.shape}; a value of shape {tuple(value.shape)} does not fit"
            )
        return value

    def _flat_of(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor flattened (1D) in the parameter's own memory order."""
        self._checked(value)
        flat = torch.empty(self._slot.numel, dtype=dtype, device=self._group.context.device.torch_device)
        flat.as_strided(self._slot.shape, self._slot.stride).copy_(value)
        return flat


def masters_of(group: ShardedGroup) -> list[Tensor]:
    """Return the full master weights (ND) of all parameters of a group whose unit waits for nothing.

    Many small parameters, which have a collective each where they are read one by one, share a few.
    """
    found: list[Tensor] = []
    with group.storage.open():
        master, is_split = group.master, group.spec.optimizer.axis is not None
        for slots in _batches(group.layout.slots):
            start, end = slots[0].offset, slots[-1].end
            flat = group.context.device.empty(end - start, group.precision.master)
            if is_split:
                _gather(group, master, flat, slots)
            else:
                flat.copy_(master[start:end])
            parts = [flat[slot.offset - start : slot.end - start] for slot in slots]
            parts = parts if len(slots) == 1 else [part.clone() for part in parts]
            found += [part.as_strided(slot.shape, slot.stride) for slot, part in zip(slots, parts, strict=True)]
    return found


def _batches(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Yield neighbouring parameters that are small together, and large ones alone: the same ones on all ranks."""
    batch, total = list[Slot](), 0
    for slot in slots:
        if batch and total + _whole_numel(slot) > READ_TOGETHER:
            yield batch
            batch, total = [], 0
        batch.append(slot)
        total += _whole_numel(slot)
    if batch:
        yield batch


def _whole_numel(slot: Slot) -> int:
    """Return the number of elements of the tensor that the parameter is a part of: parts may be uneven."""
    return slot.numel if slot.global_shape is None else product(slot.global_shape)


def _gather(group: ShardedGroup, master: Tensor, flat: Tensor, slots: Sequence[Slot]) -> None:
    """Fill `flat` with the master weights of all ranks for neighbouring parameters."""
    shard, start, end, views = group.context.roles.shard, slots[0].offset, slots[-1].end, list[Tensor]()
    for rank in range(shard.rank_group.size):
        first, last = (min(max(one, start), end) for one in group.layout.shard_range(shard.shard_index_of(rank)))
        views.append(flat[first - start : last - start])
        if rank == shard.rank_group.rank:
            views[rank].copy_(master[first - group.local_range[0] : last - group.local_range[0]])
    token = f"READ {slots[0].name} to {slots[-1].name}" if len(slots) > 1 else f"READ {slots[0].name}"
    if _whole_numel(slots[0]) > READ_TOGETHER:  # without copies of it
        for rank, view in enumerate(views):
            shard.broadcast(view, rank, TrafficKind.ALL_GATHER, token)
    else:
        shard.all_to_all([views[shard.rank_group.rank]] * len(views), views, token, TrafficKind.ALL_GATHER)


def _locate(unit: Unit, parameter: nn.Parameter) -> tuple[ShardedGroup, Slot]:
    for group in unit.groups:
        for slot, candidate in zip(group.layout.slots, group.parameters, strict=True):
            if candidate is parameter:
                return group, slot
    raise ShardwellError("this parameter is no longer part of the model that was given to initialize")


def reading(ask: Callable[[ParamAccess], Any], parameter: nn.Parameter) -> Any:
    """Call `ask` with the access to a parameter, without recording a graph."""
    with torch.no_grad():
        access = ParamAccess(parameter)
        access.take_over_gradients()
        return ask(access)
