"""A group: the parameters of one unit that share dtype, trainability and persistence, and their buffers.

- flat: all parameters back to back in the compute dtype; the parameters are views of it.
- storage: the parameters that this rank stores, and their master weights, in one of the forms of `storage.py`. If any
  of it is below the device, `offloaded` is the same storage with what only such storage can do.
- gradients: see `gradients.py`.
- all_gather: fills the flat buffer of a group that is resharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwell.kernels.rounding import narrow
from shardwell.memory import Event, FlatBuffer, StateKind, Tier
from shardwell.parallel import TrafficKind, Work
from shardwell.parallel.joined import Joined
from shardwell.parallel.mesh import RankGroup
from shardwell.sharding import edits, released
from shardwell.sharding.assembled_storage import QuantizedStorage, SplitStorage
from shardwell.sharding.context import EngineContext
from shardwell.sharding.gradients import Gradients
from shardwell.sharding.layout import ParamGroupSpan, make_layout
from shardwell.sharding.parameter_views import GroupMember, ParameterViews
from shardwell.sharding.quantized_all_gather import QuantizedAllGather, StoredQuantizedAllGather
from shardwell.sharding.secondary import AllGather, SecondaryAllGather, SecondaryShard
from shardwell.sharding.spec import CommitPolicy, GroupPrecision, ShardingSpec
from shardwell.sharding.storage import (
    DefaultAllGather,
    FormStorage,
    InPlaceStorage,
    SeparateStorage,
    ShardStorage,
    StoredPart,
)
from shardwell.sharding.storage_form import StorageForm, form_of
from shardwell.sharding.tiers import OffloadedStorage


class ShardedGroup:
    """The buffers of some parameters of one unit, placed as their spec says."""

    storage: FormStorage | OffloadedStorage
    all_gather: AllGather  # of a group that is resharded
    gradients: Gradients

    def __init__(
        self,
        name: str,
        unit: str,
        members: list[GroupMember],
        spec: ShardingSpec,
        precision: GroupPrecision,
        context: EngineContext,
    ) -> None:
        self.name, self.unit = name, unit
        self.spec, self.context = spec, context
        self.precision = replace(precision, master=torch.float32) if self.is_quantized else precision
        self.trainable = members[0].trainable
        self.stays_unsharded = False  # unsharded for good, although its spec reshards
        shard = context.roles.shard
        specs, blocks = [member.spec for member in members], context.device.machine.blocks
        # small parameters of all blocks belong to the root: where few blocks are simulated, it is padded as for all
        least = 0 if blocks is None or unit else blocks.on_all((one.name, one.numel) for one in specs)
        self.layout = make_layout(specs, shard.rank_group.size, least=least)
        by_name = {member.name: member.parameter for member in members}
        parameters = [by_name[slot.name] for slot in self.layout.slots]
        # ranks along a pipeline that have the same parameters; the first of them counts and saves them
        tied = context.tied if context.tied_name(parameters[0]) else None
        self.tied: RankGroup | None = None if tied is None else tied.comm.rank_group
        is_split = spec.optimizer.axis is not None
        self.local_range = self.layout.shard_range(shard.shard_index) if is_split else (0, self.layout.padded)
        self.flat = self._buffer(StateKind.PARAMETERS, self.layout.padded, precision.compute)
        self.views = ParameterViews(self.flat, self.layout, parameters)
        self.storage = form = self._make_storage()
        self._take_over(context)
        is_below = spec.parameters.tier is not Tier.DEVICE or Tier.DISK in form.master_bytes()
        if context.tiers is not None and is_below:
            self.storage = context.tiers.wrap(form, name, unit, spec.optimizer.tier)
        if spec.reshards:
            self.all_gather = self._make_all_gather()
        self.gradients = Gradients(name, unit, self.layout, spec, precision, shard, context.temporary)

    def _buffer(self, state: StateKind, numel: int, dtype: torch.dtype, tier: Tier = Tier.DEVICE) -> FlatBuffer:
        entry, is_shard = (state, self.unit, tier), state is StateKind.PARAMETERS
        pinned = is_shard and tier is Tier.HOST
        return FlatBuffer(self.context.device, self.context.memory_stats, entry, numel, dtype, pinned=pinned)

    def _make_part(self, form: StorageForm) -> StoredPart:
        """Allocate this rank's shard; without resharding, its part of the flat buffer is what it stores."""
        if not self.spec.reshards:
            return StoredPart(self.flat.tensor[slice(*self.local_range)], self.flat, Tier.DEVICE, is_shard=False)
        is_narrow = form in (StorageForm.SEPARATE, StorageForm.SPLIT_BF16)
        numel, dtype = self.layout.shard_numel, self.precision.compute if is_narrow else self.precision.master
        if self.spec.storage_codec is not None:
            numel, dtype = self.spec.storage_codec.num_bytes(numel), torch.uint8
        tier = self.spec.parameters.tier
        shard = self._buffer(StateKind.PARAMETERS, numel, dtype, tier)
        return StoredPart(shard.tensor, shard, tier, is_shard=True)

    def _make_storage(self) -> FormStorage:
        form = form_of(self.spec, self.precision, self.trainable)
        numel, tier, dtype = self.local_numel, self.spec.optimizer.tier, self.precision.master
        if form is StorageForm.SEPARATE:
            masters = self._buffer(StateKind.OPTIMIZER, numel, dtype, tier)
            return SeparateStorage(self._make_part(form), masters, tier, self.precision.compute)
        part = self._make_part(form)
        if form is StorageForm.IN_PLACE:
            return InPlaceStorage(part)
        if form is StorageForm.SHARD:
            return ShardStorage(part)
        remainder = None
        if form is StorageForm.SPLIT_BF16:
            remainder = self._buffer(StateKind.OPTIMIZER, numel, torch.int16, tier)
        staging = self._buffer(StateKind.STAGING, numel, dtype, Tier.DEVICE if part.tier is Tier.DEVICE else Tier.HOST)
        if remainder is not None:
            return SplitStorage(part, staging, remainder, tier)
        assert self.spec.storage_codec is not None
        return QuantizedStorage(part, staging, self.spec.storage_codec)

    def _make_all_gather(self) -> AllGather:
        stored_codec, what = self.spec.storage_codec, (self.name, self.flat, self.storage)
        secondary: SecondaryShard | None = None  # hpZ
        if self.spec.secondary is not None and self.context.roles.secondary is not None:
            secondary = SecondaryShard(self.name, self.unit, self.context.roles.secondary, self.context.temporary)
        if stored_codec is not None:
            return StoredQuantizedAllGather(*what, stored_codec, self.context, secondary)
        comm, local, codec = self.context.roles.shard, slice(*self.local_range), self.spec.all_gather_codec
        inner = DefaultAllGather(*what, comm, local)
        if codec is not None:
            inner = QuantizedAllGather(*what, comm, local, codec)
        if secondary is None:
            return inner
        return SecondaryAllGather(inner, secondary, self.flat, is_rounded=codec is not None)

    def _take_over(self, context: EngineContext) -> None:
        """Move rank 0's values into the buffers of all ranks, and make the parameters views of the flat buffer."""
        whole = self.flat.tensor
        if self.precision.is_mixed:
            whole = context.device.empty(self.layout.padded, self.precision.master)
        whole[self.layout.numel :].zero_()
        for index, (slot, parameter) in enumerate(zip(self.layout.slots, self.parameters, strict=True)):
            kept = released.is_owned(parameter)
            values = released.owner_of(parameter).hand_over(parameter) if kept else parameter.data
            whole.as_strided(slot.shape, slot.stride, slot.offset).copy_(values)
            del values
            self.views.make_view(index)
        self.views.num_aliases = self.flat.num_aliases
        context.roles.data.broadcast(whole, token=f"SETUP {self.name}")
        self.write(whole)
        edits.note_digest(self)
        if self.spec.reshards:
            self.flat.free()
            released.release(self.parameters)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters, in slot order; they are views of the flat buffer, or released."""
        return self.views.parameters

    @property
    def _form(self) -> FormStorage:
        """Return the storage without its tier."""
        return self.storage if isinstance(self.storage, FormStorage) else self.storage.wrapped

    @property
    def offloaded(self) -> OffloadedStorage | None:
        """Return the storage if any of it is below the device."""
        return None if isinstance(self.storage, FormStorage) else self.storage

    @property
    def secondary(self) -> SecondaryShard | None:
        """Return the secondary shard of the parameters within the node (hpZ), if there is one."""
        return self.all_gather.secondary if self.spec.reshards else None

    @property
    def local_numel(self) -> int:
        """Return the number of elements of this rank's part of the flat buffer."""
        return self.local_range[1] - self.local_range[0]

    @property
    def is_stepped_on_host(self) -> bool:
        """Whether the optimizer state is below the device, and so the host steps it."""
        return self.trainable and self.spec.optimizer.tier is not Tier.DEVICE

    @property
    def is_stored_on_device(self) -> bool:
        """Whether the stored parameters are in memory of the device's own: updates on the host are copied to it."""
        return self.context.device.has_device_memory and self._form.part.tier is Tier.DEVICE

    @property
    def is_quantized(self) -> bool:
        """Whether the parameters are stored quantised."""
        return self.spec.storage_codec is not None

    def take_in(self, index: int, values: Tensor) -> None:
        """Copy `values` into a parameter whose memory was replaced, and make it a view again.

        `values` have the parameter's shape. Where a value did not change, the master weight keeps its lower half.
        """
        slot, (start, end) = self.layout.slots[index], self.local_range
        before = self.flat.tensor[slot.offset : slot.end].clone()
        self.views.make_view(index).copy_(values)
        first, last = max(slot.offset, start), min(slot.end, end)
        if (
            isinstance(self._form, SplitStorage) and not self.spec.reshards and first < last
        ):  # part of it is in this rank's shard
            changed = before[first - slot.offset : last - slot.offset] != self.flat.tensor[first:last]
            self._form.zero_remainder(first - start, changed)

    def detach_leaked_views(self) -> None:
        """Leave the memory to views that outlive the unsharded parameters: freeing it would crash their readers."""
        if self.flat.num_aliases > self.views.num_aliases:
            self.flat.abandon_storage()
            self.views.make_all()

    def write(self, whole: Tensor) -> None:
        """Write `whole` (1D, padded, master dtype) to the master weights; `flat` must be allocated, and is filled."""
        if whole is not self.flat.tensor:
            narrow(whole, self.flat.tensor)
        local = slice(*self.local_range)
        self.storage.write(whole[local], self.flat.tensor[local])

    def write_back(self, source: int) -> None:
        """Write parameters that rank `source` changed while unsharded to the master weights of all ranks.

        Where a 16-bit value did not change, the master weight keeps its lower half. Stored quantised values are
        quantised again.
        """
        self.context.roles.data.broadcast(self.flat.tensor, source, TrafficKind.ALL_GATHER, f"WRITE {self.name}")
        self.invalidate_secondary()
        compute = self.flat.tensor[slice(*self.local_range)].to(self.master.device)
        with self.swapped_in(changes=True):
            master = compute.to(self.precision.master)
            before = self.master if self._form.form is StorageForm.SEPARATE else self.views.masters_before
            if before is not None and self.precision.is_mixed:
                master = torch.where(master == self._rounded(before).to(master.dtype), before, master)
            self.storage.write(master, compute)
        if self.views.masters_before is not None:
            self.views.masters_before = master
        self.regather_quantized()

    def replace_master(self, fill: Callable[[Tensor], None]) -> None:
        """Let `fill` write this rank's master weights, and all-gather them where parameters are unsharded."""
        with self.storage.open(changes=True):
            fill(self.master)
        self.invalidate_secondary()
        if self.is_quantized:
            self.regather_quantized()
            return
        if self.flat.present and self._form.part.is_shard:
            with self.swapped_in():
                narrow(self.storage.parameters.to(self.flat.tensor.device), self.flat.tensor[slice(*self.local_range)])
        if self.flat.present and self.spec.optimizer.axis is not None:
            self.context.roles.shard.all_gather(self.flat.tensor, f"WRITE {self.name}", TrafficKind.SETUP).wait()

    def regather_quantized(self) -> None:
        """All-gather unsharded parameters again after their quantised values changed. All ranks must call it."""
        if self.is_quantized and self.flat.present:
            self.all_gather().wait()
            if self.views.masters_before is not None:
                self.open_for_writing()

    def open_for_writing(self) -> None:
        """Save the master weights, because the user may now overwrite their upper halves."""
        if self.precision.is_mixed and self._form.form is not StorageForm.SEPARATE:
            with self.storage.open():
                self.views.masters_before = self.master.clone()

    def _rounded(self, masters: Tensor) -> Tensor:
        """Round master weights as an all-gather does: codecs round as torch does."""
        compute = torch.empty_like(masters, dtype=self.precision.compute)
        return compute.copy_(masters) if self.is_quantized else narrow(masters, compute)

    def note_changed_master(self, start: int, values: Tensor) -> None:
        """Record a permanent change of a slice of master weights whose upper halves the user may overwrite."""
        if self.views.masters_before is not None:
            self.views.masters_before[start : start + values.numel()] = values

    def close_for_writing(self) -> None:
        """Drop the saved master weights."""
        self.views.masters_before = None

    def free(self) -> None:
        """Free all buffers; the parameters have another owner."""
        self.gradients.free()
        self.invalidate_secondary()
        self.storage.free()
        self.flat.free()

    # ------------------------------------------------------------------------------------------------- residency

    @property
    def can_prefetch_to_device(self) -> bool:
        """Whether a shard can be copied to the device ahead of its all-gather."""
        return self.offloaded is not None and self.offloaded.can_prefetch_to_device

    def prefetch_from_disk(self) -> bool:
        """Start to read a shard on disk, because its all-gather is near; false if there is nothing to read."""
        return self.offloaded is not None and not self.has_secondary and self.offloaded.prefetch_from_disk()

    def prefetch_to_device(self) -> bool:
        """Start to copy a shard below the device to the device, for the all-gather after the next one."""
        return self.offloaded is not None and not self.has_secondary and self.offloaded.prefetch_to_device()

    def remake_views(self) -> None:
        """Make the parameters, which are released, views of the flat buffer's new storage: the old one stays."""
        with torch._C.DisableTorchFunctionSubclass():
            self.views.make_all()
        self.flat.end_replacing()

    @property
    def is_aliased(self) -> bool:
        """Whether the group was resharded while views of it still exist."""
        return self.flat.is_aliased and self.flat.num_aliases > self.views.num_aliases

    def keep_unsharded(self) -> None:
        """Stay unsharded from now on: the parameters do not change, and an unquantised shard is a slice of them."""
        self.stays_unsharded = True
        self.invalidate_secondary()
        self.all_gather.secondary = None
        if self.offloaded is not None:
            self.offloaded.cancel_prefetch()
        if not self.is_quantized:
            self.storage.free()
            part = StoredPart(self.flat.tensor[slice(*self.local_range)], self.flat, Tier.DEVICE, is_shard=False)
            self.storage = InPlaceStorage(part)

    @property
    def has_secondary(self) -> bool:
        """Whether the next all-gather stays within the node. The answer is the same on all ranks."""
        return self.secondary is not None and self.secondary.is_valid

    def invalidate_secondary(self) -> None:
        """Drop the secondary shard. All ranks must do so together: the next all-gather is over all of them."""
        if self.secondary is not None:
            self.secondary.invalidate()

    def publish(self, joined: Joined | None = None) -> Work:
        """All-gather the updated slices of all ranks; `joined` starts that together with those of other groups."""
        shard = self.context.roles.shard
        comm = shard if joined is None else joined.over(shard)
        return comm.all_gather(self.flat.tensor, f"PUBLISH {self.name}", TrafficKind.PUBLISH)

    # ------------------------------------------------------------------------------------------------- offload

    def send_up(self, values: Tensor, start: int, after: Event) -> Event:
        """Start copying updated parameters to their storage, once the device is done with the old ones."""
        device = self.context.device
        if not self.is_stored_on_device:
            return Event()
        with device.upload_stream.after(after), torch.no_grad():
            self.storage.parameters[start : start + values.numel()].copy_(values, non_blocking=True)
        return device.upload_stream.record()

    # ---------------------------------------------------------------------------------------------- the optimizer

    @property
    def spans(self) -> list[ParamGroupSpan]:
        """Return this rank's slices of the master weights, at least one per parameter group."""
        layout = self.layout if self.spec.optimizer.axis is not None else replace(self.layout, num_shards=1)
        return layout.runs(self.context.roles.shard.shard_index if self.spec.optimizer.axis is not None else 0)

    def relabel(self, labels: list[int]) -> None:
        """Assign the parameters to these parameter groups; no optimizer may know the spans yet."""
        slots = [replace(slot, label=label) for slot, label in zip(self.layout.slots, labels, strict=True)]
        self.layout = replace(self.layout, slots=tuple(slots))

    @property
    def master(self) -> Tensor:
        """Return this rank's master weights (1D) as the optimizer steps them."""
        return self.storage.master

    @property
    def split_master(self) -> tuple[Tensor, Tensor] | None:
        """Return this rank's bf16 upper halves and remainders (both 1D), if master weights are stored so."""
        form = self._form
        return (form.parameters, form.remainder) if isinstance(form, SplitStorage) else None

    def commit_by(self, commit: CommitPolicy) -> None:
        """Change the commit policy from now on."""
        self.spec = replace(self.spec, commit=commit)
        self.gradients.spec = self.spec

    def swap_masters(self, spare: Tensor) -> None:
        """Exchange the memory of separate master weights with `spare`, which has the same size and dtype."""
        assert isinstance(self._form, SeparateStorage)
        self._form.swap_masters(spare)

    def slice_master(self, start: int, numel: int) -> Tensor:
        """Return a view of a slice of the master weights, which stays valid when they get other memory."""
        return self._form.slice_master(start, numel)

    def master_bytes(self) -> dict[Tier, int]:
        """Return the bytes that the optimizer holds beside the parameters, by tier."""
        return self._form.master_bytes()

    def swapped_in(self, *, changes: bool = False) -> AbstractContextManager[None]:
        """Return a context in which the state on disk is swapped in. It may be nested."""
        return contextlib.nullcontext() if self.offloaded is None else self.offloaded.swapped_in(changes=changes)

    @property
    def may_be_edited_apart(self) -> bool:
        """Whether a change of a parameter leaves its master weight unchanged."""
        return self._form.form is StorageForm.SEPARATE and not self.spec.reshards
