"""A group: the parameters of one unit that share dtype, trainability and persistence, and their buffers.

- flat: all parameters back to back in the compute dtype; the parameters are views of it.
- shard: this rank's slice in storage of its own, quantised or not (specs that reshard their parameters).
- remainder: the lower halves of this rank's fp32 master weights (specs that keep bf16 parameters unsharded, or store
  them below the device together with their master weights).
- master: the master weights as the optimizer steps them. They are a separate copy (below the parameters, or for
  unsharded fp16 parameters, which are not the upper half of an fp32 number), the shard, a slice of `flat`, or a staging
  buffer that holds joined bf16 plus remainder, or dequantised values, only while it is open.

State on disk is in swapped tensors: the shard in a `SwappedShard`, master weights or remainder in another set.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwell.kernels.rounding import join, narrow, split
from shardwell.memory import Event, FlatBuffer, StateKind, Tier
from shardwell.offload.param_swap import SwappedShard
from shardwell.offload.swapped_tensors import SwappedTensors
from shardwell.parallel import TrafficKind, Work
from shardwell.sharding import edits, released
from shardwell.sharding.context import EngineContext
from shardwell.sharding.gradients import Gradients
from shardwell.sharding.layout import ParamGroupSpan, make_layout
from shardwell.sharding.parameter_views import GroupMember, ParameterViews
from shardwell.sharding.secondary import SecondaryShard
from shardwell.sharding.shard import StoredShard
from shardwell.sharding.spec import CommitPolicy, GroupPrecision, ShardingSpec
from shardwell.sharding.storage import StorageForm, form_of


class ShardedGroup:
    """The buffers of some parameters of one unit, placed as their spec says."""

    parameters: list[nn.Parameter]  # in slot order
    places: ParameterViews  # views of `flat`
    gradients: Gradients
    spans: list[tuple[ParamGroupSpan, Tensor]]  # this rank's slices of the masters, 1D, one per parameter group

    def __init__(
        self,
        name: str,
        unit: str,
        members: list[GroupMember],
        row: ShardingSpec,
        precision: GroupPrecision,
        context: EngineContext,
    ) -> None:
        self.name, self.unit = name, unit
        self.row, self.context = row, context
        self.precision = replace(precision, master=torch.float32) if self.is_quantized else precision
        self.trainable = members[0].trainable
        self.stays_whole = False  # unsharded for good, although its spec reshards
        self.is_exact = True  # unsharded with the stored values, not with those that a codec rounded
        world = context.world.mesh
        self.layout = make_layout([member.spec for member in members], world.size)
        by_name = {member.name: member.parameter for member in members}
        self.parameters = [by_name[slot.name] for slot in self.layout.slots]
        is_split = row.optimizer.axis is not None
        self.own = self.layout.shard_range(context.world.shard_index) if is_split else (0, self.layout.padded)
        self.flat = self._buffer(StateKind.PARAMETERS, self.layout.padded, precision.compute)
        self.shard: StoredShard | None = None
        self.remainder: FlatBuffer | None = None
        self._apart: FlatBuffer | None = None  # master weights in a buffer of their own
        self.chest: SwappedTensors | None = None  # holds master weights or remainder on disk
        self._joined: FlatBuffer | None = None  # master weights that are joined only while they are open
        self._cuts: list[tuple[weakref.ref[Tensor], int]] = []  # slices of the master weights, and where they start
        # hash of the stored parameters, where they cannot be compared with the master weights at every step
        self.digest: Tensor | None = None
        self._num_openings = 0  # nested `open_master` contexts
        self._before: Tensor | None = None  # master weights while the user may overwrite their upper halves
        self._allocate_master()
        self._take_over(context)
        self._store(context)
        self.gradients = Gradients(name, unit, self.layout, row, precision, context.world, context.scratch)

    def _buffer(self, state: StateKind, numel: int, dtype: torch.dtype, tier: Tier = Tier.DEVICE) -> FlatBuffer:
        return FlatBuffer(self.context.device, self.context.account, (state, self.unit, tier), numel, dtype)

    def _allocate_master(self) -> None:
        own, tier = self.own[1] - self.own[0], self.row.optimizer.tier
        form = form_of(self.row, self.precision, self.trainable)
        if form is StorageForm.SEPARATE:
            self._apart = self._buffer(StateKind.OPTIMIZER, own, self.precision.master, tier)
        if self.row.reshards:
            has_own_master = form in (StorageForm.SEPARATE, StorageForm.SPLIT_BF16)
            dtype = self.precision.compute if has_own_master else self.precision.master
            self.shard = StoredShard(self.name, self.unit, self.row, self.layout.shard_numel, dtype, self.context)
        if form is StorageForm.SPLIT_BF16:
            self.remainder = self._buffer(StateKind.OPTIMIZER, own, torch.int16, tier)
        if form.is_assembled:
            where = Tier.DEVICE if self.row.parameters.tier is Tier.DEVICE else Tier.HOST
            self._joined = self._buffer(StateKind.STAGING, own, self.precision.master, where)
            self._joined.free()
        self.spans = [(run, self.slice_master(run.start, run.numel)) for run in self._make_spans()]

    def _take_over(self, context: EngineContext) -> None:
        """Move rank 0's values into the buffers of all ranks, and make the parameters views of the flat buffer."""
        whole = self.flat.tensor
        if self.precision.is_mixed:
            whole = context.device.empty(self.layout.padded, self.precision.master)
        whole[self.layout.numel :].zero_()
        self.places = ParameterViews(self.flat, self.layout, self.parameters)
        for index, (slot, parameter) in enumerate(zip(self.layout.slots, self.parameters, strict=True)):
            kept = released.is_owned(parameter)
            values = released.owner_of(parameter).hand_over(parameter) if kept else parameter.data
            whole.as_strided(slot.shape, slot.stride, slot.offset).copy_(values)
            del values
            self.places.hang(index)
        self._num_views = self.flat.num_aliases  # the parameters and the buffer itself
        context.world.broadcast(whole, token=f"SETUP {self.name}")
        self.write(whole)
        edits.note_digest(self)
        if self.row.reshards:
            self.flat.free()
            released.release(self.parameters)

    def _store(self, context: EngineContext) -> None:
        """Write the state that is stored on disk to disk."""
        if context.disk is None:
            return
        if self.shard is not None:
            self.shard.send_to_disk()
        below = self._apart or self.remainder
        if below is not None and self.row.optimizer.tier is Tier.DISK:
            me = weakref.ref(self)

            def on_move() -> None:
                group = me()
                if group is not None and group._apart is not None:
                    group._reslice()

            self.chest = SwappedTensors(context.disk, context.account, self.unit, on_move)
            self.chest.register([below.tensor])

    @property
    def is_quantized(self) -> bool:
        """Whether the parameters are stored quantised."""
        return self.row.storage_codec is not None

    @property
    def swapped_shard(self) -> SwappedShard | None:
        """Return the swapped shard, if the shard is stored on disk."""
        return self.shard.page if self.shard is not None else None

    @property
    def secondary(self) -> SecondaryShard | None:
        """Return the secondary shard (hpZ), if the spec has one."""
        return self.shard.second if self.shard is not None else None

    @property
    def swapped_tensors(self) -> list[SwappedTensors]:
        """Return everything of this group that is stored on disk."""
        return [
            *([self.swapped_shard.chest] if self.swapped_shard is not None else []),
            *([self.chest] if self.chest is not None else []),
        ]

    def take_in(self, index: int, values: Tensor) -> None:
        """Copy `values` into a parameter whose memory was replaced, and make it a view again.

        `values` have the parameter's shape. Where a value did not change, the master weight keeps its lower half.
        """
        slot, (start, end) = self.layout.slots[index], self.own
        before = self.flat.tensor[slot.offset : slot.end].clone()
        self.places.hang(index).copy_(values)
        first, last = max(slot.offset, start), min(slot.end, end)
        if self.remainder is not None and not self.row.reshards and first < last:  # part of it is in this rank's shard
            changed = before[first - slot.offset : last - slot.offset] != self.flat.tensor[first:last]
            self.remainder.tensor[first - start : last - start].masked_fill_(changed, 0)

    def detach_leaked_views(self) -> None:
        """Leave the memory to views that outlive the unsharded parameters: freeing it would crash their readers."""
        if self.flat.num_aliases > self._num_views:
            self.flat.abandon_storage()
            self.places.hang_all()

    def write(self, whole: Tensor) -> None:
        """Write `whole` (1D, padded, master dtype) to the master weights; `flat` must be allocated, and is filled."""
        start, end = self.own
        if whole is not self.flat.tensor:
            narrow(whole, self.flat.tensor)
            if self.remainder is not None:
                low = torch.empty_like(self.remainder.tensor, device=whole.device)
                split(whole[start:end], self.flat.tensor[start:end], low)
                self.remainder.tensor.copy_(low)
        if self._apart is not None:
            self._apart.tensor.copy_(whole[start:end])
        if self.shard is not None:
            first, last = self.layout.shard_range(self.context.world.shard_index)
            as_it_is = self.is_quantized or self.shard.tensor.dtype == whole.dtype
            self.shard.store((whole if as_it_is else self.flat.tensor)[first:last])

    def write_back(self, source: int) -> None:
        """Write parameters that rank `source` changed while unsharded to the master weights of all ranks.

        Where a 16-bit value did not change, the master weight keeps its lower half. Stored quantised values are
        quantised again.
        """
        flat, (start, end) = self.flat.tensor, self.own
        self.context.world.broadcast(flat, source, TrafficKind.GATHER, f"WRITE {self.name}")
        self.invalidate_secondary()
        truth = flat[start:end].to(self.master.device, self.precision.master)
        with self.swapped_in(changes=True):
            before = self._before if self._apart is None else self._apart.tensor
            if before is not None and self.precision.is_mixed:
                rounded = self._rounded(before)
                truth = torch.where(truth == rounded.to(truth.dtype), before, truth)
            if self._apart is not None:
                self._apart.tensor.copy_(truth)
            if self.remainder is not None:
                split(truth, self.at_rest, self.remainder.tensor)
            elif self.shard is not None:
                self.shard.store(truth)
        if self._before is not None:
            self._before = truth
        self.regather_quantized()

    def replace_master(self, fill: Callable[[Tensor], None]) -> None:
        """Let `fill` write this rank's master weights, and all-gather them where parameters are unsharded."""
        with self.open_master(changes=True):
            fill(self.master)
        self.invalidate_secondary()
        if self.is_quantized:
            self.regather_quantized()
            return
        if self.flat.present and self.shard is not None:
            with self.swapped_in():
                narrow(self.shard.tensor.to(self.flat.tensor.device), self.flat.tensor[self.own[0] : self.own[1]])
        if self.flat.present and self.row.optimizer.axis is not None:
            self.context.world.all_gather(self.flat.tensor, f"WRITE {self.name}", TrafficKind.SETUP).wait()

    def regather_quantized(self) -> None:
        """All-gather unsharded parameters again after their quantised values changed. All ranks must call it."""
        if self.is_quantized and self.flat.present:
            self.all_gather().wait()
            if self._before is not None:
                self.open_for_writing()

    def open_for_writing(self) -> None:
        """Save the master weights, because the user may now overwrite their upper halves."""
        if self.precision.is_mixed and self._apart is None:
            with self.open_master():
                self._before = self.master.clone()

    def _rounded(self, masters: Tensor) -> Tensor:
        """Round master weights as an all-gather does: codecs round as torch does."""
        compute = torch.empty_like(masters, dtype=self.precision.compute)
        return compute.copy_(masters) if self.is_quantized else narrow(masters, compute)

    def note_changed_master(self, start: int, values: Tensor) -> None:
        """Record a permanent change of a slice of master weights whose upper halves the user may overwrite."""
        if self._before is not None:
            self._before[start : start + values.numel()] = values

    def close_for_writing(self) -> None:
        """Drop the saved master weights."""
        self._before = None

    def free(self) -> None:
        """Free all buffers; the parameters have another owner."""
        self.gradients.free()
        if self.shard is not None:
            self.shard.free()
        if self.chest is not None:
            self.chest.free()
        for buffer in (self.flat, self.remainder, self._apart, self._joined):
            if buffer is not None:
                buffer.free()

    # ------------------------------------------------------------------------------------------------- residency

    def all_gather(self, *, exact: bool = False) -> Work:
        """Start the all-gather of a resharded group; `exact` sends unquantised values, which the caller may keep."""
        assert self.shard is not None
        codec = None if exact else self.row.all_gather_codec
        self.is_exact = codec is None
        return self.shard.all_gather(self.flat, codec, keeps=not self.stays_whole)

    def prefetch_from_disk(self) -> bool:
        """Start to read a shard on disk, because its all-gather is near; false if there is nothing to read."""
        return self.shard is not None and self.shard.prefetch_from_disk()

    def prefetch_to_device(self) -> bool:
        """Start to copy a shard below the device to the device, for the all-gather after the next one."""
        return self.shard is not None and self.shard.prefetch_to_device()

    def cancel_prefetch(self) -> None:
        """Drop prefetched copies: no all-gather is near after all, or the stored values will change."""
        if self.shard is not None:
            self.shard.cancel_prefetch()

    def reshard(self) -> None:
        """Free the unsharded parameters unless views of them exist; a later call tries again."""
        self.flat.free_unseen(self._num_views)

    @property
    def is_seen(self) -> bool:
        """Whether the group was resharded while views of it still exist."""
        return self.flat.is_seen and self.flat.num_aliases > self._num_views

    def keep_unsharded(self) -> None:
        """Never reshard again: these parameters do not change, and an unquantised shard is a slice of them."""
        self.stays_whole = True
        self.invalidate_secondary()
        self.cancel_prefetch()
        if self.shard is not None and not self.is_quantized:
            self.shard.free()
            self.shard = None

    @property
    def has_secondary(self) -> bool:
        """Whether the next all-gather stays within the node. The answer is the same on all ranks."""
        return self.secondary is not None and self.secondary.is_there

    def invalidate_secondary(self) -> None:
        """Drop the secondary shard. All ranks must do so together: the next all-gather is over all of them."""
        if self.secondary is not None:
            self.secondary.forget()

    def publish(self) -> Work:
        """All-gather the updated slices of all ranks."""
        return self.context.world.all_gather(self.flat.tensor, f"PUBLISH {self.name}", TrafficKind.PUBLISH)

    # ------------------------------------------------------------------------------------------------- offload

    def send_up(self, values: Tensor, start: int, after: Event) -> Event:
        """Start copying updated parameters to their storage, once the device is done with the old ones."""
        device = self.context.device
        if not self.at_rest.is_cuda:
            return Event()
        with device.upload_stream.after(after), torch.no_grad():
            self.at_rest[start : start + values.numel()].copy_(values, non_blocking=True)
        return device.upload_stream.record()

    @property
    def at_rest(self) -> Tensor:
        """Return this rank's part of the stored parameters: 1D, in the compute dtype, or quantised."""
        return self.shard.tensor if self.shard is not None else self.flat.tensor[self.own[0] : self.own[1]]

    # ---------------------------------------------------------------------------------------------- the optimizer

    def _make_spans(self) -> list[ParamGroupSpan]:
        layout = self.layout if self.row.optimizer.axis is not None else replace(self.layout, num_shards=1)
        return layout.runs(self.context.world.shard_index if self.row.optimizer.axis is not None else 0)

    def relabel(self, labels: list[int]) -> None:
        """Assign the parameters to these parameter groups; no optimizer may know the spans yet."""
        slots = [replace(slot, label=label) for slot, label in zip(self.layout.slots, labels, strict=True)]
        self.layout = replace(self.layout, slots=tuple(slots))
        self.spans = [(run, self.slice_master(run.start, run.numel)) for run in self._make_spans()]

    @property
    def master(self) -> Tensor:
        """Return this rank's master weights (1D) as the optimizer steps them."""
        for buffer in (self._apart, self._joined, self.shard):
            if buffer is not None:
                return buffer.tensor
        return self.flat.tensor[self.own[0] : self.own[1]]

    @property
    def split_master(self) -> tuple[Tensor, Tensor] | None:
        """Return this rank's bf16 upper halves and remainders (both 1D), if masters are stored so below the device."""
        if self.remainder is None or not self.row.allows_split_master:
            return None
        return self.at_rest, self.remainder.tensor

    @property
    def is_stepped_on_host(self) -> bool:
        """Whether the optimizer state is stored on the host or on disk."""
        return self.trainable and self.row.optimizer.tier is not Tier.DEVICE

    def commit_by(self, commit: CommitPolicy) -> None:
        """Change the commit policy from now on."""
        self.row = replace(self.row, commit=commit)
        self.gradients.commit = commit

    def move_masters_up(self) -> None:
        """Move master weights from the host or from disk to the device for good."""
        if self.split_master is not None:
            self._set_apart()
        elif self.chest is not None:
            self.chest.restore()
            self.chest = None
        before = self._apart
        assert before is not None
        self.row = replace(self.row, optimizer=replace(self.row.optimizer, tier=Tier.DEVICE))
        self.commit_by(CommitPolicy.AFTER_NORM)
        self._apart = self._buffer(StateKind.OPTIMIZER, before.tensor.numel(), before.tensor.dtype)
        self._apart.tensor.copy_(before.tensor)
        before.free()
        self.digest = None
        self._reslice()

    def _set_apart(self) -> None:
        """Store master weights that are bf16 plus remainder as fp32 on the host from now on."""
        assert self.remainder is not None
        with self.open_master():
            apart = self._buffer(StateKind.OPTIMIZER, self.remainder.tensor.numel(), self.precision.master, Tier.HOST)
            apart.tensor.copy_(self.master)
        if self.chest is not None:
            self.chest.free()
            self.chest = None
        self.remainder.free()
        self.remainder = self._joined = None
        self._apart = apart

    def swap_masters(self, spare: Tensor) -> None:
        """Exchange the memory of separate master weights with `spare`, which has the same size and dtype."""
        assert self._apart is not None
        masters = self._apart.tensor
        before, masters.data = masters.data, spare.data
        spare.data = before
        self._reslice()

    def _reslice(self) -> None:
        """Point existing slices of the master weights to their new memory."""
        self._cuts = [(cut, start) for cut, start in self._cuts if cut() is not None]
        for cut, start in self._cuts:
            tensor = cut()
            if tensor is not None:
                tensor.data = self.master[start : start + tensor.numel()]

    def slice_master(self, start: int, numel: int) -> Tensor:
        """Return a view of a slice of the master weights; freed storage allows no views, so it is allocated first."""
        away = self._joined is not None and not self._joined.present
        if self._joined is not None and away:
            self._joined.allocate()
        view = self.master[start : start + numel]
        if self._joined is not None and away:
            self._joined.free()
        self._cuts.append((weakref.ref(view), start))
        return view

    def master_bytes(self) -> dict[Tier, int]:
        """Return the bytes that the optimizer holds beside the parameters, by tier."""
        held = self._apart or self.remainder
        return {} if held is None else {self.row.optimizer.tier: held.nbytes}

    @contextlib.contextmanager
    def swapped_in(self, *, changes: bool = False) -> Iterator[None]:
        """Have the state on disk swapped in. The context may be nested."""
        self.cancel_prefetch()
        with contextlib.ExitStack() as stack:
            for chest in self.swapped_tensors:
                stack.enter_context(chest.swapped_in(changes=changes))
            yield

    @contextlib.contextmanager
    def open_master(self, *, changes: bool = False) -> Iterator[None]:
        """Make `master` readable; changes made inside are kept, also if an error follows."""
        with self.swapped_in(changes=changes), contextlib.ExitStack() as stack:
            if self._joined is not None:
                stack.callback(self._joined.free)
                self._join(self._joined)
            if self._num_openings == 0:  # inside another one, master weights may be ahead of the stored parameters
                edits.take_over_in_place(self)
            stack.callback(setattr, self, "_num_openings", self._num_openings)
            self._num_openings += 1
            if changes:
                stack.callback(self._take_over_masters)
            yield

    @property
    def may_be_edited_apart(self) -> bool:
        """Whether a change of a parameter leaves its master weight unchanged."""
        return self._apart is not None and not self.row.reshards

    def _join(self, joined: FlatBuffer) -> None:
        """Fill the staging buffer with fp32 master weights for as long as they are open."""
        joined.allocate()
        if self.shard is not None and self.is_quantized:
            self.shard.decode(joined.tensor)
        elif self.remainder is not None:
            join(self.at_rest, self.remainder.tensor, joined.tensor)

    def _take_over_masters(self) -> None:
        """Write the values of the master weights to the stored parameters."""
        if self._apart is not None:
            rounded = self._apart.tensor
            if self.precision.is_mixed:
                rounded = narrow(rounded, torch.empty_like(rounded, dtype=self.precision.compute))
            self.at_rest.copy_(rounded)
        elif self._joined is not None and self.shard is not None and self.is_quantized:
            self.shard.store(self._joined.tensor)
        elif self._joined is not None and self.remainder is not None:
            split(self._joined.tensor, self.at_rest, self.remainder.tensor)
