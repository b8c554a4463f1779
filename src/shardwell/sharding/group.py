"""A group: the parameters of one unit that share dtype, trainability and persistence, and their three buffers.

- flat: compute dtype, all parameters back to back; the parameters are views of it
- shard: this rank's slice in storage of its own (rows that release their parameters), in numbers or in codes
- remainder: the lower halves of this rank's fp32 masters (rows that keep bf16 parameters whole, or rest them below the
  device together with their masters)
- master: the truth, as the optimizer steps it: a copy apart (below the parameters, or for whole fp16 parameters, which
  are no half of anything), the shard, a slice of `flat`, or for as long as somebody looks upper and lower halves
  joined, or codes decoded

What rests on disk is in chests: the shard in one of its own, that is a page; masters or remainder in another.
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
    """The buffers of some parameters of one unit, placed as their row says."""

    parameters: list[nn.Parameter]  # in slot order
    places: ParameterViews  # in `flat`
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
        self.stays_whole = False  # whole for good, although its row would release it
        self.is_exact = True  # whole as it rests, and not as a codec left it
        world = context.world.mesh
        self.layout = make_layout([member.spec for member in members], world.size)
        by_name = {member.name: member.parameter for member in members}
        self.parameters = [by_name[slot.name] for slot in self.layout.slots]
        is_split = row.optimizer.axis is not None
        self.own = self.layout.shard_range(context.world.shard_index) if is_split else (0, self.layout.padded)
        self.flat = self._buffer(StateKind.PARAMETERS, self.layout.padded, precision.compute)
        self.shard: StoredShard | None = None
        self.remainder: FlatBuffer | None = None
        self._apart: FlatBuffer | None = None  # masters that rest apart from the parameters
        self.chest: SwappedTensors | None = None  # that those, or the remainder, are in if they rest on disk
        self._joined: FlatBuffer | None = None  # masters that are whole numbers only while somebody looks
        self._cuts: list[tuple[weakref.ref[Tensor], int]] = []  # stretches of the masters, and where they start
        self.digest: Tensor | None = None  # of what rests, where masters cannot be compared with it at every step
        self._num_openings = 0  # of the masters
        self._before: Tensor | None = None  # masters while the user may overwrite their upper halves
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
        """Move the parameters' values into the buffers, rank 0's for everyone, and make the parameters views."""
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
        self._num_views = self.flat.num_aliases  # the parameters, the buffer itself, and nobody else
        context.world.broadcast(whole, token=f"SETUP {self.name}")
        self.write(whole)
        edits.note_digest(self)
        if self.row.reshards:
            self.flat.free()
            released.release(self.parameters)

    def _store(self, context: EngineContext) -> None:
        """What rests on disk goes there now."""
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
        """It rests in codes."""
        return self.row.storage_codec is not None

    @property
    def swapped_shard(self) -> SwappedShard | None:
        """That the shard is in, if it rests on disk."""
        return self.shard.page if self.shard is not None else None

    @property
    def secondary(self) -> SecondaryShard | None:
        return self.shard.second if self.shard is not None else None

    @property
    def swapped_tensors(self) -> list[SwappedTensors]:
        """Of all that rests on disk."""
        return [
            *([self.swapped_shard.chest] if self.swapped_shard is not None else []),
            *([self.chest] if self.chest is not None else []),
        ]

    def take_in(self, index: int, values: Tensor) -> None:
        """A parameter was given other memory: its values are those (of its shape), and it is a view again.

        Where a value did not change, a master keeps its lower half.
        """
        slot, (start, end) = self.layout.slots[index], self.own
        before = self.flat.tensor[slot.offset : slot.end].clone()
        self.places.hang(index).copy_(values)
        first, last = max(slot.offset, start), min(slot.end, end)
        if self.remainder is not None and not self.row.reshards and first < last:  # some of it is this rank's
            changed = before[first - slot.offset : last - slot.offset] != self.flat.tensor[first:last]
            self.remainder.tensor[first - start : last - start].masked_fill_(changed, 0)

    def detach_leaked_views(self) -> None:
        """If somebody still looks at the whole parameters, leave them that memory: freeing it would crash them."""
        if self.flat.num_aliases > self._num_views:
            self.flat.abandon_storage()
            self.places.hang_all()

    def write(self, whole: Tensor) -> None:
        """Make `whole` (1D, padded, in the master dtype) the truth. `flat` must be present, and is filled."""
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
        """The parameters were changed on rank `source` while whole: make that the truth everywhere.

        Where a 16-bit value did not change, the master keeps its lower half. What rests in codes is encoded again.
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
        """Let `fill` write this rank's part of the truth. Where parameters are whole, all ranks are sent theirs."""
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
        """Whole parameters that rest in codes become what those say now. All ranks must call it."""
        if self.is_quantized and self.flat.present:
            self.all_gather().wait()
            if self._before is not None:
                self.open_for_writing()

    def open_for_writing(self) -> None:
        """Remember the masters, if the user may now overwrite their upper halves."""
        if self.precision.is_mixed and self._apart is None:
            with self.open_master():
                self._before = self.master.clone()

    def _rounded(self, masters: Tensor) -> Tensor:
        """As a gather rounds them: codecs do so as torch does."""
        compute = torch.empty_like(masters, dtype=self.precision.compute)
        return compute.copy_(masters) if self.is_quantized else narrow(masters, compute)

    def note_changed_master(self, start: int, values: Tensor) -> None:
        """A stretch of the masters was changed for good while the user may overwrite their upper halves."""
        if self._before is not None:
            self._before[start : start + values.numel()] = values

    def close_for_writing(self) -> None:
        self._before = None

    def free(self) -> None:
        """Let go of everything; the parameters belong to somebody else."""
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
        """Start making a released group whole; `exact`: without a codec, because somebody may keep what he sees."""
        assert self.shard is not None
        codec = None if exact else self.row.all_gather_codec
        self.is_exact = codec is None
        return self.shard.all_gather(self.flat, codec, keeps=not self.stays_whole)

    def prefetch_from_disk(self) -> bool:
        """It will be gathered soon: begin to read what rests on disk."""
        return self.shard is not None and self.shard.prefetch_from_disk()

    def prefetch_to_device(self) -> bool:
        """It will be gathered next but one: begin to copy what rests below the device."""
        return self.shard is not None and self.shard.prefetch_to_device()

    def cancel_prefetch(self) -> None:
        """It will not be gathered soon after all, or what rests will change."""
        if self.shard is not None:
            self.shard.cancel_prefetch()

    def reshard(self) -> None:
        """Free the whole parameters, unless somebody looks at views of them; may be asked again."""
        self.flat.free_unseen(self._num_views)

    @property
    def is_seen(self) -> bool:
        """It was released, and somebody still looks at it."""
        return self.flat.is_seen and self.flat.num_aliases > self._num_views

    def keep_unsharded(self) -> None:
        """Never release again: nothing changes these parameters, and a shard of numbers is a slice of the whole."""
        self.stays_whole = True
        self.invalidate_secondary()
        self.cancel_prefetch()
        if self.shard is not None and not self.is_quantized:
            self.shard.free()
            self.shard = None

    @property
    def has_secondary(self) -> bool:
        """The next gather will not leave the node. The same on all ranks."""
        return self.secondary is not None and self.secondary.is_there

    def invalidate_secondary(self) -> None:
        """All ranks must do so at once: the next gather is over all of them."""
        if self.secondary is not None:
            self.secondary.forget()

    def publish(self) -> Work:
        """Send this rank's updated slice to everyone."""
        return self.context.world.all_gather(self.flat.tensor, f"PUBLISH {self.name}", TrafficKind.PUBLISH)

    # --------------------------------------------------------------------------------------- between the tiers

    def send_up(self, values: Tensor, start: int, after: Event) -> Event:
        """Start copying updated parameters to where they rest, once the device is done with the old ones."""
        device = self.context.device
        if not self.at_rest.is_cuda:
            return Event()
        with device.upload_stream.after(after), torch.no_grad():
            self.at_rest[start : start + values.numel()].copy_(values, non_blocking=True)
        return device.upload_stream.record()

    @property
    def at_rest(self) -> Tensor:
        """1D, this rank's part of the parameters as they rest: in the compute dtype, or codes."""
        return self.shard.tensor if self.shard is not None else self.flat.tensor[self.own[0] : self.own[1]]

    # ---------------------------------------------------------------------------------------------- the optimizer

    def _make_spans(self) -> list[ParamGroupSpan]:
        layout = self.layout if self.row.optimizer.axis is not None else replace(self.layout, num_shards=1)
        return layout.runs(self.context.world.shard_index if self.row.optimizer.axis is not None else 0)

    def relabel(self, labels: list[int]) -> None:
        """Let the parameters belong to these parameter groups; no optimizer must know the runs yet."""
        slots = [replace(slot, label=label) for slot, label in zip(self.layout.slots, labels, strict=True)]
        self.layout = replace(self.layout, slots=tuple(slots))
        self.spans = [(run, self.slice_master(run.start, run.numel)) for run in self._make_spans()]

    @property
    def master(self) -> Tensor:
        """1D, this rank's part of the truth as the optimizer steps it."""
        for buffer in (self._apart, self._joined, self.shard):
            if buffer is not None:
                return buffer.tensor
        return self.flat.tensor[self.own[0] : self.own[1]]

    @property
    def split_master(self) -> tuple[Tensor, Tensor] | None:
        """Both 1D: this rank's masters as upper and lower halves, if they rest so below the device."""
        if self.remainder is None or not self.row.allows_split_master:
            return None
        return self.at_rest, self.remainder.tensor

    @property
    def is_stepped_on_host(self) -> bool:
        """Its optimizer state rests there, or on disk."""
        return self.trainable and self.row.optimizer.tier is not Tier.DEVICE

    def commit_by(self, commit: CommitPolicy) -> None:
        """Updates become the truth at another time from now on."""
        self.row = replace(self.row, commit=commit)
        self.gradients.commit = commit

    def move_masters_up(self) -> None:
        """Masters that rest on the host or on disk go to the device for good."""
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
        """Masters that rest in halves rest whole from now on, on the host."""
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
        """Masters that rest apart change places with `spare`, memory like theirs."""
        assert self._apart is not None
        masters = self._apart.tensor
        before, masters.data = masters.data, spare.data
        spare.data = before
        self._reslice()

    def _reslice(self) -> None:
        """The masters have other memory: stretches that were cut are of that, too."""
        self._cuts = [(cut, start) for cut, start in self._cuts if cut() is not None]
        for cut, start in self._cuts:
            tensor = cut()
            if tensor is not None:
                tensor.data = self.master[start : start + tensor.numel()]

    def slice_master(self, start: int, numel: int) -> Tensor:
        """A view of a stretch of the masters; one of dropped storage refuses new views, so it is grown for the cut."""
        away = self._joined is not None and not self._joined.present
        if self._joined is not None and away:
            self._joined.allocate()
        view = self.master[start : start + numel]
        if self._joined is not None and away:
            self._joined.free()
        self._cuts.append((weakref.ref(view), start))
        return view

    def master_bytes(self) -> dict[Tier, int]:
        """What this group holds for the optimizer beside the parameters, by tier."""
        held = self._apart or self.remainder
        return {} if held is None else {self.row.optimizer.tier: held.nbytes}

    @contextlib.contextmanager
    def swapped_in(self, *, changes: bool = False) -> Iterator[None]:
        """Have what rests on disk in memory. May be nested."""
        self.cancel_prefetch()
        with contextlib.ExitStack() as stack:
            for chest in self.swapped_tensors:
                stack.enter_context(chest.swapped_in(changes=changes))
            yield

    @contextlib.contextmanager
    def open_master(self, *, changes: bool = False) -> Iterator[None]:
        """Have `master` readable; what changes there counts, also if an error follows."""
        with self.swapped_in(changes=changes), contextlib.ExitStack() as stack:
            if self._joined is not None:
                stack.callback(self._joined.free)
                self._join(self._joined)
            if self._num_openings == 0:  # inside of another one, masters may be ahead of what rests
                edits.take_over_in_place(self)
            stack.callback(setattr, self, "_num_openings", self._num_openings)
            self._num_openings += 1
            if changes:
                stack.callback(self._take_over_masters)
            yield

    @property
    def may_be_edited_apart(self) -> bool:
        """Whoever changes a parameter does not change its master with it."""
        return self._apart is not None and not self.row.reshards

    def _join(self, joined: FlatBuffer) -> None:
        """Fill masters that are whole numbers only while somebody looks."""
        joined.allocate()
        if self.shard is not None and self.is_quantized:
            self.shard.decode(joined.tensor)
        elif self.remainder is not None:
            join(self.at_rest, self.remainder.tensor, joined.tensor)

    def _take_over_masters(self) -> None:
        """What rests becomes what the masters say."""
        if self._apart is not None:
            rounded = self._apart.tensor
            if self.precision.is_mixed:
                rounded = narrow(rounded, torch.empty_like(rounded, dtype=self.precision.compute))
            self.at_rest.copy_(rounded)
        elif self._joined is not None and self.shard is not None and self.is_quantized:
            self.shard.store(self._joined.tensor)
        elif self._joined is not None and self.remainder is not None:
            split(self._joined.tensor, self.at_rest, self.remainder.tensor)
