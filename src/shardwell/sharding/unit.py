"""A unit: a module together with the groups of parameters that it owns.

A unit is the smallest thing that is all-gathered or reduce-scattered. Its residency is a state machine with a count of
holders. It assumes no phase of training, because early-stopped recomputation, reentrant checkpointing and generation
have none.
"""

from __future__ import annotations

import contextlib
import enum
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwell.errors import ReleasedParameterError, ShardwellError
from shardwell.parallel import TrafficKind, Work
from shardwell.parallel.in_flight import LeftInFlight
from shardwell.parallel.joined import Joined
from shardwell.sharding import edits, released
from shardwell.sharding.group import ShardedGroup
from shardwell.sharding.pending_update import FailedUpdate, PendingUpdate
from shardwell.sharding.unit_state import GroupSets, UnitUpdates, UnitUse
from shardwell.sharding.wrap import UnitSpec


class Residency(enum.Enum):
    """The states of a unit: its parameters are sharded, being all-gathered, or unsharded."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere


class UnitOptimizer(Protocol):
    """The optimizer that steps units, as far as they know it; `optim/unit_optimizer.py` knows its class."""

    def hide_slice_gradients(self) -> None:
        """Let a read of `grad` of the tensors that are stepped raise an error while the engine holds gradients."""


@dataclass
class UnitOwner:
    """The requests of a unit to the engine that schedules it; one object for all its units."""

    retain: Callable[[Unit], bool]  # unshards and retains the unit; false if that is not allowed now
    reduce_now: Callable[[Unit], None]  # averages its gradients before the boundary
    take_gradient_edits: Callable[[], None]  # takes over gradients that the user has set or deleted
    take_edits: Callable[[], None]  # checks all units for values that were changed by hand
    adopt: Callable[[Any], None] | None = None  # takes over an optimizer of the user that `initialize` was not given
    optimizer: UnitOptimizer | None = None  # what steps the units
    end: Callable[[], None] | None = None  # ends the engine, for another one that gets its model


class Unit:
    """A module and its groups, with their residency."""

    # precomputed from the groups by `_sort`
    resharding_groups: list[ShardedGroup]  # groups that are resharded
    numel: int  # elements that an all-gather fills

    def __init__(self, index: int, spec: UnitSpec, groups: list[ShardedGroup]) -> None:
        self.index, self.name = index, spec.name
        self.spec, self.groups = spec, groups
        self.trainable = [group for group in groups if group.trainable]
        self.keeps_frozen = False  # frozen groups stay unsharded after their first all-gather
        self._sort()
        self.residency = Residency.SHARDED if self.resharding_groups else Residency.UNSHARDED
        self.owner: UnitOwner | None = None  # None before a scheduler has adopted it
        self.use, self.updates, self.changes = UnitUse(), UnitUpdates(), released.ChangeWatch(self.sets.parameters)
        self._pending: list[Work] = []
        for parameter in self.sets.parameters:
            released.set_owner(parameter, self)

    def _sort(self) -> None:
        """Compute what follows from which groups are resharded."""
        self.resharding_groups = [group for group in self.groups if group.spec.reshards and not group.stays_unsharded]
        self.numel = sum(group.layout.padded for group in self.resharding_groups)
        self.sets = GroupSets.of(self.groups, self.trainable, self.resharding_groups)

    @property
    def optimizer(self) -> UnitOptimizer | None:
        """Return the optimizer that steps the unit, or None."""
        return None if self.owner is None else self.owner.optimizer

    @property
    def module(self) -> nn.Module:
        """Return the module."""
        return self.spec.module

    @property
    def is_unsharded(self) -> bool:
        """Whether the parameters are unsharded and complete."""
        return self.residency is Residency.UNSHARDED

    @property
    def is_held(self) -> bool:
        """Whether anything needs the unit unsharded."""
        use = self.use
        return bool(use.in_forward or use.in_parts or use.in_backward or use.num_contexts or use.is_retained)

    @property
    def is_aliased(self) -> bool:
        """Whether the unit was resharded while views of it exist, so that its memory stays."""
        found = False
        for group in self.resharding_groups:
            found = found or (group.flat.is_aliased and group.is_aliased)
        return found

    def free_if_unaliased(self) -> None:
        """Free the unsharded parameters of a resharded unit, unless views of them exist; a later call tries again."""
        for group in self.resharding_groups if self.residency is Residency.SHARDED else ():
            group.flat.free_if_unaliased(group.views.num_aliases)
            if group.flat.is_replaced:
                group.remake_views()

    # The methods below are idempotent: a second call in the same state does nothing, and its result says so.

    def unshard(self, *, exact: bool = False) -> bool:
        """Start the all-gather; true if it was started.

        `exact`: all-gather the stored values, also if the spec quantises them for the all-gather.
        """
        if self.residency is not Residency.SHARDED and not (exact and self.changes.is_rounded):
            return False
        if not self.changes.has_warned_of_views and self.is_aliased:
            self._warn_of_views()
        self.wait()
        self.residency = Residency.UNSHARDING
        self.changes.is_rounded = self.sets.has_codec and not exact
        self.changes.gathered_at = self.updates.count
        try:
            joined = self._joined("GATHER", TrafficKind.ALL_GATHER) if self.sets.joins_gathers else None
            for group in self.resharding_groups:
                stays = self.keeps_frozen and not group.trainable
                self._pending.append(group.all_gather(exact=exact or stays, joined=joined))
            if joined is not None:
                joined.start()
        except BaseException:
            self._abandon_unshard()
            raise
        return True

    def _joined(self, action: str, kind: TrafficKind) -> Joined:
        """Return what collects the collectives of the unit's groups, to start them as one."""
        return Joined(f"{action} {self.name or '(root)'}", kind)

    def _warn_of_views(self) -> None:
        self.changes.has_warned_of_views = True
        warnings.warn(
            f"a view of a parameter of unit '{self.name or '(root)'}' was kept when the unit was released: each rank "
            "then holds only its shard, but this unit's whole memory stays as long as the view does. Outside of the "
            "unit's forward and backward the view shows what was true when the unit was last unsharded. Make such "
            "views anew in each forward, or keep copies of them (`clone`).",
            stacklevel=2,
        )

    def _abandon_unshard(self) -> None:
        """Reshard the unit after an all-gather has failed, so that the next one starts anew."""
        pending, self._pending = self._pending, []
        for one in pending:
            with contextlib.suppress(Exception):  # the first error is the one that counts
                one.wait()
        if self.resharding_groups:
            device = self.resharding_groups[0].context.device
            for stream in (device.all_gather_stream, device.reduce_stream):  # copies that were started may still write
                stream.record().wait()
            self._free_unsharded()

    def wait(self) -> None:
        """Wait for an all-gather, a publish or an update that is in flight."""
        if self.updates.is_awaited or self.residency is Residency.UNSHARDING:
            self._finish_pending()
        self.updates.pending = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # waits and changes of classes cannot be in a graph
    def _finish_pending(self) -> None:
        if self.updates.is_awaited:
            self._wait_for_update()
        if self.residency is Residency.UNSHARDING:
            try:
                for pending in self._pending:
                    pending.wait()
            except BaseException:
                self._abandon_unshard()
                raise
            self._pending = []
            self.residency = Residency.UNSHARDED
            released.restore(self.sets.parameters)

    def reshard(self) -> bool:
        """Free the unsharded parameters unless the unit is held; true if anything was freed."""
        if self.residency is Residency.SHARDED or not self.resharding_groups or self.is_held:
            return False
        # a caller that reshards does not read the values
        if self.residency is Residency.UNSHARDING or not self.updates.is_hidden:
            self.wait()
        if self.keeps_frozen:
            for group in self.resharding_groups:
                if not group.trainable and group.all_gather.is_exact:
                    group.keep_unsharded()
            self._sort()
            if not self.resharding_groups:
                return False
        self._free_unsharded()
        return True

    def _free_unsharded(self) -> None:
        self.changes.check(self)
        if self.changes.was_opened:
            for group in self.resharding_groups:
                group.detach_leaked_views()
        self.changes.was_opened = False
        self.residency = Residency.SHARDED
        released.release(self.sets.resharding_parameters)
        self.free_if_unaliased()

    def abandon_passes(self) -> None:
        """Forget passes, gradients and what is in flight after a failure. Stored values and finished updates stay."""
        self.use = UnitUse()
        for group in self.trainable:
            group.gradients.abandon()
        if self.updates.pending is not None and not isinstance(self.updates.pending, FailedUpdate):
            self.wait_local_update()
            self.updates.pending, self.updates.is_awaited = None, False
            self._pending = []  # it would wait for the update, and publish it
        if self.residency is Residency.UNSHARDING:
            self._abandon_unshard()
            if not self.resharding_groups:  # a publish was in flight: each rank has the slices that it updated itself
                self.residency = Residency.UNSHARDED
                released.restore(self.sets.parameters)

    def retain(self) -> None:
        """Keep the unit unsharded until the step, for code outside its module."""
        self.use.is_retained = self.changes.was_retained = True

    def check_retention(self) -> None:
        """Look for changes of a retained unit before an update hides them."""
        if self.changes.was_retained:
            self.changes.check(self, closely=True)

    # ------------------------------------------------------------------------------------------- state below the device

    @property
    def can_prefetch_to_device(self) -> bool:
        """Whether shards can be copied to the device ahead of their all-gather."""
        return any(group.can_prefetch_to_device for group in self.sets.offloaded)

    def prefetch_from_disk(self) -> bool:
        """Start to read shards on disk, because the all-gather is near, unless an update has to come first."""
        started = False
        for group in self.sets.offloaded if self.residency is Residency.SHARDED and self.is_up_to_date else ():
            started = group.prefetch_from_disk() or started
        return started

    def prefetch_to_device(self) -> bool:
        """Start to copy shards below the device, for the all-gather after the next one, unless an update is due."""
        started = False
        for group in self.sets.offloaded if self.residency is Residency.SHARDED and self.is_up_to_date else ():
            started = group.prefetch_to_device() or started
        return started

    @property
    def is_on_device(self) -> bool:
        """Whether a prefetched copy of a shard is on the device, or in flight to it."""
        return any(group.offloaded is not None and group.offloaded.is_on_device for group in self.sets.offloaded)

    def cancel_prefetch(self) -> None:
        """Drop prefetched copies: no all-gather is near after all, or the stored values will change."""
        for group in self.sets.offloaded:
            if group.offloaded is not None:
                group.offloaded.cancel_prefetch()

    # --------------------------------------------------------------------------------------------------------- updates

    @property
    def is_up_to_date(self) -> bool:
        """Whether a use of the unit would not wait for an update now.

        The answer differs between ranks: no decision that leads to a collective may depend on it.
        """
        return not self.updates.is_awaited or self.updates.pending is None or self.updates.pending.is_done

    def await_update(self, arrival: PendingUpdate | None, *, hides: bool = False) -> None:
        """Let users of the unit wait for an update that was started before it is published. None: no update any more.

        `hides`: a read of an unsharded parameter that the update writes to waits, too.
        """
        self.updates.pending, self.updates.is_awaited = arrival, arrival is not None
        if hides:
            self.updates.is_hidden = True
            released.release(self.sets.unsharded)
        elif arrival is None:
            self._show()

    def revoke_speculation(self) -> None:
        """Show the committed values of this rank's part: an update that may not be committed is undone."""
        if self.updates.is_hidden:
            self.wait_local_update()

    def _show(self) -> None:
        if self.updates.is_hidden:
            self.updates.is_hidden = False
            released.restore(self.sets.unsharded)

    def wait_local_update(self) -> None:
        """Wait for the update of this rank's part, without the collectives that `wait` may start."""
        if self.updates.pending is not None:
            with self._failing_for_good():
                self.updates.pending.wait_local()
            self._show()

    def _wait_for_update(self) -> None:
        assert self.updates.pending is not None
        self.updates.is_awaited = False
        with self._failing_for_good():
            self.updates.pending.wait()
        self._show()

    @contextlib.contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        """Let every later use of the unit fail, too, if its update fails inside."""
        try:
            yield
        except Exception as error:
            self.fail(f"the update of unit '{self.name or '(root)'}'", error)
            raise

    def fail(self, what: str, error: Exception) -> None:
        """Let every later use of the unit raise an error, because its values may be updated in part."""
        if not isinstance(self.updates.pending, FailedUpdate):  # the first error stays
            self.updates.pending = FailedUpdate(what, error)
        self.updates.is_awaited = True

    def _after(self, arrival: PendingUpdate, groups: list[ShardedGroup]) -> Callable[[], None]:
        """Return a function that waits for an update and then publishes it."""

        def finish() -> None:
            with self._failing_for_good():
                arrival.wait()
            for pending in self._publish(groups):
                pending.wait()

        return finish

    def publish(self, arrival: PendingUpdate | None = None) -> bool:
        """Start the all-gather of the updated slices of groups that stay unsharded; readers wait for it.

        With `arrival` the update itself is still in flight: users of the unit wait for that first.
        """
        groups = self.sets.published
        if self.resharding_groups:
            if arrival is not None:  # without one, an earlier update may still be in flight
                self.updates.pending, self.updates.is_awaited = arrival, True
            for pending in self._publish(groups):  # persistent groups: they must be complete before any read
                pending.wait()
        elif groups or arrival is not None:
            self.wait()
            self.residency = Residency.UNSHARDING
            released.release(self.sets.unsharded)
            self.updates.pending, self.updates.is_hidden = arrival, False
            self._pending = [Work(self._after(arrival, groups))] if arrival else self._published(groups)
        return bool(groups)

    def _published(self, groups: list[ShardedGroup]) -> list[Work]:
        """Start the all-gathers of groups. If this rank leaves before it waits for them, peers still get its part."""
        if self.updates.published is None:
            context = groups[0].context
            self.updates.published = LeftInFlight(context.roles.agreement, context.device)
        self.updates.published.works = works = self._publish(groups)
        return works

    def _publish(self, groups: list[ShardedGroup]) -> list[Work]:
        """Start the all-gathers of updated slices, several groups' as one."""
        if not self.sets.joins_reductions:
            return [group.publish() for group in groups]
        joined = self._joined("PUBLISH", TrafficKind.PUBLISH)
        works = [group.publish(joined) for group in groups]
        joined.start()
        return works

    # ---------------------------------------------------------------------------------------- as a parameter owner

    def request_values(self, parameter: nn.Parameter, wanted_by: str) -> None:
        """Bring back the values of a released parameter; `ReleasedParameter` calls this when they are used."""
        self.revoke_speculation()
        if self.residency is Residency.UNSHARDING:
            is_gathered = any(parameter is other for other in self.sets.resharding_parameters)
            self.wait()
            if is_gathered and self.owner is not None:
                self.owner.retain(self)  # nothing else holds a unit that was only prefetched
        if released.is_released(parameter) and not (self.owner is not None and self.owner.retain(self)):
            raise ReleasedParameterError(
                f"'{wanted_by}' needs the values of {self._name_of(parameter)}, but they are released: each rank holds "
                f"only its shard of unit '{self.name}'. Read them inside "
                "`with shardwell.zero.GatheredParameters(parameter):`, change them there with modifier_rank=0, or get "
                "and set all of them with engine.state_dict() and engine.load_state_dict(). In a forward, and in a "
                "loss until its step, they come by themselves."
            )

    def end_request(self, parameter: nn.Parameter) -> None:
        """Do nothing: a unit stays unsharded for its holders."""

    def hand_over(self, parameter: nn.Parameter) -> Tensor:
        """Raise the error that another engine owns the parameter."""
        raise ShardwellError(
            f"parameter {self._name_of(parameter)} belongs to another engine already. Call destroy() of that engine "
            "before the model is handed to initialize again."
        )

    def __reduce__(self) -> Any:
        """Pickle as None: a copy of a parameter, or one in a file, has no owner."""
        return type(None), ()

    def open(self) -> None:
        """Make the unit unsharded until `close`; all ranks must call it."""
        with self._failing_together():
            self.unshard(exact=True)
            self.wait()
            self.take_over_edits()
            self.use.num_contexts += 1
            self.changes.was_opened = True
            try:
                for group in self.groups if self.use.num_contexts == 1 else ():
                    group.open_for_writing()
            except BaseException:
                self.close(None)
                raise

    def take_over_edits(self) -> None:
        """Take over values that were changed by hand, so that later reads see them."""
        if self.owner is not None and not self.changes.is_off:
            self.owner.take_edits()

    def _failing_together(self) -> contextlib.AbstractContextManager[None]:
        agreement = self.groups[0].context.roles.agreement
        return agreement.failing_together(f"GatheredParameters of '{self.name or '(root)'}'")

    @property
    def num_sharing(self) -> int:
        """Return the number of ranks among which `modifier_rank` is counted."""
        return min(group.context.roles.data.rank_group.size for group in self.groups)

    def close(self, modifier_rank: int | None) -> None:
        """End `open`; with `modifier_rank`, that rank's values are written on all ranks."""
        fitting: list[bool] = []
        try:
            with self._failing_together():
                self.wait_local_update()  # it started while the unit was open, from the values before
                fitting = [edits.bring_home(group, modifier_rank) for group in self.groups]
                for group in self.groups:
                    if modifier_rank is not None:
                        group.write_back(modifier_rank)
                if modifier_rank is not None:
                    self.changes.reset(self.sets.parameters)
                elif self.use.num_contexts == 1 and all(fitting):
                    self.changes.check(self, closely=True)
        finally:
            for group in self.groups if self.use.num_contexts == 1 else ():
                group.close_for_writing()
            if all(fitting):
                self.use.num_contexts -= 1
                self.reshard()
            else:
                self.changes.needs_rebuild = True  # it stays open, and the engine rebuilds it before it is used again

    def _name_of(self, parameter: nn.Parameter) -> str:
        for group in self.groups:
            for slot, candidate in zip(group.layout.slots, group.parameters, strict=True):
                if candidate is parameter:
                    return f"'{slot.name}' {tuple(slot.shape)}"
        return "a parameter"
