"""A unit: a module together with the groups of parameters it owns. The smallest thing that is gathered or reduced.

Residency is a state machine with a count of holders; no phase of training is assumed, because early-stopped
recomputation, reentrant checkpointing and generation know none.
"""

from __future__ import annotations

import contextlib
import enum
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwell.errors import ReleasedParameterError, ShardwellError
from shardwell.parallel import Work
from shardwell.sharding import edits, released
from shardwell.sharding.group import ShardedGroup
from shardwell.sharding.spec import CommitPolicy
from shardwell.sharding.wrap import UnitSpec


class PendingUpdate(Protocol):
    """An update that is on its way."""

    @property
    def is_done(self) -> bool:
        """The host has done its part."""

    def wait_local(self) -> None:
        """Wait for it, as a rank can alone."""

    def wait(self) -> None:
        """Wait for it, and do what follows for all ranks."""


class Residency(enum.Enum):
    SHARDED = "released"
    UNSHARDING = "gathering"
    UNSHARDED = "whole"

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere


_ALLOWED = {
    Residency.SHARDED: {Residency.UNSHARDING},
    Residency.UNSHARDING: {Residency.UNSHARDED, Residency.SHARDED},  # the latter: it failed
    Residency.UNSHARDED: {Residency.SHARDED, Residency.UNSHARDING},  # the latter: a publish
}


_CLOSE_LOOKS = 4  # what a forward does to its own parameters it does from the start


class Unit:
    """A module and its groups."""

    def __init__(self, index: int, one: UnitSpec, groups: list[ShardedGroup]) -> None:
        self.index, self.name, self.module, self.groups = index, one.name, one.module, groups
        self.is_brief = one.is_tile  # a recomputed forward does not keep it for its backward: it is gathered again
        self.is_named = one.is_named  # by the user: ranks may use different parts of it, or none
        self.trainable = [group for group in groups if group.trainable]
        self.keeps_frozen = False  # frozen groups stay whole once they are
        self._sort()
        self.residency = Residency.SHARDED if self.releasable else Residency.UNSHARDED
        self.in_forward = 0  # running forwards that hold it
        self.inside = 0  # running forwards of parts of it
        self.num_updates = 0  # of its parameters, since it was built
        self.in_backward = False
        self.opened = 0  # GatheredParameters contexts that hold it
        self._was_opened = False  # since it was gathered: the user may have views of it
        self._is_exact = False  # was gathered as it rests
        self._keeps_quiet = False  # about views that the user keeps
        self.misfit = False  # a parameter was given another shape
        self._versions = edits.versions(self._parameters(groups))
        self._has_warned = False  # of changes that are lost
        self.is_retained = False  # somebody outside its module may still look at it
        self._was_lent = False  # since it was gathered
        self._gathered_at = 0  # after so many updates
        self._num_close_looks = 0  # at what was changed while it was whole
        self.fetch: Callable[[Unit], bool] | None = None  # asks for a loan; false if it is not the time for one
        self.average: Callable[[Unit], None] | None = None  # averages its gradients before the boundary
        self.take_over_gradients: Callable[[], None] | None = None  # that the user has set or taken away
        self.look: Callable[[], None] | None = None  # at all units, for values that were changed by hand
        self.optimizer: Any = None  # who steps it
        self.adopt: Callable[[Any], None] | None = None  # takes over an optimizer of the user's that nobody gave
        self.has_news = False  # gradients came in this backward
        self.task = -1  # the autograd graph task it was last seen in: when that ends, so does its backward
        self._pending: list[Work] = []
        self._arrival: PendingUpdate | None = None  # an update that nobody has waited for yet
        self._update: PendingUpdate | None = None  # the same, also of a unit whose publish waits for it
        self.is_ahead = False  # of a step: on some ranks at least, its update was begun. The same on all ranks
        self.is_watched = False  # whoever uses it between a backward and its step is noticed
        self._is_hidden = False  # parameters that rest whole are away: they may hold what will never be true
        for group in groups:
            for parameter in group.parameters:
                released.keep(parameter, self)

    def _sort(self) -> None:
        is_whole = [group for group in self.trainable if not group.row.reshards or group.stays_whole]
        self._resting = [parameter for group in is_whole for parameter in group.parameters if parameter.numel()]
        self.releasable = [group for group in self.groups if group.row.reshards and not group.stays_whole]
        self.numel = sum(group.layout.padded for group in self.releasable)  # elements that a gather makes whole

    @property
    def is_held(self) -> bool:
        return bool(self.in_forward or self.inside or self.in_backward or self.opened or self.is_retained)

    @property
    def is_seen(self) -> bool:
        """It was released, but somebody looks at views of it, so its memory stays."""
        return any(group.is_seen for group in self.releasable)

    def free_unseen(self) -> None:
        """Free what nobody looks at any more."""
        for group in self.releasable if self.residency is Residency.SHARDED else ():
            group.reshard()

    def _move(self, residency: Residency) -> None:
        assert residency in _ALLOWED[self.residency], f"{self.name}: {self.residency} -> {residency}"
        self.residency = residency

    # All of these are idempotent: a second call in the same state does nothing and says so.

    def unshard(self, *, exact: bool = False) -> bool:
        """Start making it whole; true if that moved anything. `exact`: as it rests, also if it travels encoded."""
        is_coded = exact and not self._is_exact and any(group.row.all_gather_codec for group in self.releasable)
        if self.residency is not Residency.SHARDED and not is_coded:
            return False
        self._tell_of_views()
        self.wait()
        self._move(Residency.UNSHARDING)
        self._is_exact, self._gathered_at = exact, self.num_updates
        frozen_too = {group for group in self.releasable if self.keeps_frozen and not group.trainable}
        with self._released_on_error():
            for group in self.releasable:
                self._pending.append(group.all_gather(exact=exact or group in frozen_too))
        return True

    def _tell_of_views(self) -> None:
        """Say once that somebody keeps a view of its parameters."""
        if self._keeps_quiet or not self.is_seen:
            return
        self._keeps_quiet = True
        warnings.warn(
            f"a view of a parameter of unit '{self.name or '(root)'}' was kept when the unit was released: each rank "
            "then holds only its shard, but this unit's whole memory stays as long as the view does. Outside of the "
            "unit's forward and backward the view shows what was true when the unit was last whole. Make such views "
            "anew in each forward, or keep copies of them (`clone`).",
            stacklevel=2,
        )

    @contextlib.contextmanager
    def _released_on_error(self) -> Iterator[None]:
        """Nothing of a gather that fails counts: the next one begins anew."""
        try:
            yield
        except BaseException:
            pending, self._pending = self._pending, []
            for one in pending:
                with contextlib.suppress(Exception):  # what went wrong first is what counts
                    one.wait()
            if self.releasable:
                self.releasable[0].context.device.all_gather_stream.record().wait()  # what was begun may still write
                self._drop()
            raise

    def prefetch_from_disk(self) -> bool:
        """It will be gathered soon: begin to read what rests on disk, unless it has to be updated first."""
        return (
            self._rests and sum(group.prefetch_from_disk() for group in self.releasable) > 0
        )  # all of them, not up to the first

    def prefetch_to_device(self) -> bool:
        """It will be gathered next but one: begin to copy what rests below the device, unless it has to be updated."""
        return self._rests and sum(group.prefetch_to_device() for group in self.releasable) > 0

    @property
    def _rests(self) -> bool:
        return self.residency is Residency.SHARDED and self.is_up_to_date

    @property
    def can_prefetch_to_device(self) -> bool:
        return any(group.shard is not None and group.shard.is_liftable for group in self.releasable)

    @property
    def is_on_device(self) -> bool:
        return any(group.shard is not None and group.shard.is_on_device for group in self.releasable)

    def cancel_prefetch(self) -> None:
        """It will not be gathered soon after all, or what rests will change."""
        for group in self.releasable:
            group.cancel_prefetch()

    def wait(self) -> None:
        """Finish a gather, a publish, or an update that is on its way."""
        self._arrive()
        if self.residency is Residency.UNSHARDING:
            with self._released_on_error():
                for pending in self._pending:
                    pending.wait()
            self._pending = []
            self._move(Residency.UNSHARDED)
            released.restore(self._parameters(self.groups))
        self._update = None

    @property
    def awaits_update(self) -> bool:
        """Nobody has waited for it since its update was queued: the same on all ranks."""
        return self._arrival is not None

    @property
    def is_up_to_date(self) -> bool:
        """Whoever needs it now will not wait for an update. Ranks differ: nothing that they do together may ask."""
        return self._arrival is None or self._arrival.is_done

    def await_update(self, arrival: PendingUpdate | None, *, hides: bool = False) -> None:
        """An update was begun ahead of being published: who needs the unit waits for it. None: no more.

        `hides`: so does who reads a parameter that rests whole, and that the update writes to.
        """
        self._arrival = self._update = arrival
        if hides:
            self._is_hidden = True
            released.release(self._parameters(self._resting_whole))
        elif arrival is None:
            self._show()

    @property
    def _resting_whole(self) -> list[ShardedGroup]:
        return [group for group in self.trainable if group not in self.releasable]

    @property
    def may_be_hidden(self) -> bool:
        """Updates of it are begun before it is known that they may be."""
        return self.is_watched or any(group.row.commit is CommitPolicy.SPECULATIVE for group in self.trainable)

    def revoke_speculation(self) -> None:
        """Let everybody see what is true, of this rank's part: what may not become true is taken back."""
        if self._is_hidden:
            self.wait_local_update()

    def _show(self) -> None:
        if self._is_hidden:
            self._is_hidden = False
            released.restore(self._parameters(self._resting_whole))

    def wait_local_update(self) -> None:
        """Wait for an update of this rank's part: alone, where `wait` may do what all ranks do together."""
        if self._update is not None:
            self._update.wait_local()
            self._show()

    def _arrive(self) -> None:
        if self._arrival is not None:
            arrival, self._arrival = self._arrival, None
            arrival.wait()
            self._show()

    def reshard(self) -> bool:
        """Free what may be freed, unless somebody holds it; true if that freed anything."""
        if not self.releasable or self.is_held or self.residency is Residency.SHARDED:
            return False
        if self.residency is Residency.UNSHARDING or not self._is_hidden:  # who gives it back does not look at it
            self.wait()
        if self.keeps_frozen:
            for group in self.releasable:
                if not group.trainable and group.is_exact:
                    group.keep_unsharded()
            self._sort()
            if not self.releasable:
                return False
        self._drop()
        return True

    def retain(self) -> None:
        """Let somebody outside its module look at it until the step."""
        self.is_retained = self._was_lent = True

    def _drop(self) -> None:
        self._look_for_lost_changes(closely=self._was_lent or self._num_close_looks < _CLOSE_LOOKS)
        self._num_close_looks += 1
        self._was_lent = False
        if self._was_opened:
            for group in self.releasable:
                group.detach_leaked_views()
        self._was_opened = False
        self._move(Residency.SHARDED)
        released.release(self._parameters(self.releasable))
        for group in self.releasable:
            group.reshard()

    def check_retention(self) -> None:
        """Before an update: what was changed of a unit that is lent would be heard of no more."""
        if self._was_lent:
            self._look_for_lost_changes(closely=True)

    def _look_for_lost_changes(self, *, closely: bool) -> None:
        """Whole parameters are about to be freed: what was changed in place would be heard of no more.

        Changes of `p.data` are not counted by torch. `closely`: values are compared with what rests.
        """
        now = edits.versions(self._parameters(self.groups))
        is_lost = closely and self._is_as_it_rests and any(edits.is_unlike_its_shard(g) for g in self.releasable)
        if (is_lost or now != self._versions) and not self._has_warned:
            slots = [slot for group in self.groups for slot in group.layout.slots]
            freed = {id(slot) for group in self.releasable for slot in group.layout.slots}
            changed = zip(slots, now, self._versions, strict=True)
            names = [slot.name for slot, after, before in changed if after != before and id(slot) in freed]
            if names or is_lost:
                self._has_warned = True
                edits.warn_of_lost(self.name, names)
        self._versions = now

    @property
    def _is_as_it_rests(self) -> bool:
        """Nothing but the user can have changed its values since it was gathered, or what rests."""
        is_updated = self.num_updates != self._gathered_at or self.is_ahead or self._update is not None
        return self.residency is Residency.UNSHARDED and not is_updated and self._arrival is None

    def note_update(self) -> None:
        """A step has changed its parameters: a graph that saved them must not be gone through any more.

        Torch checks that for what rests whole. What is released is checked where it is read, see `SavedView`.
        """
        self.num_updates += 1
        if self._resting:
            torch.autograd.graph.increment_version(self._resting)

    def publish(self, arrival: PendingUpdate | None = None) -> bool:
        """Start sending the updated slices of groups that rest whole; readers wait for it.

        With `arrival` the update itself is still on its way: who needs the unit waits for that first.
        """
        groups = [group for group in self.groups if group.row.publishes and group.trainable]
        if groups and groups[0].context.world.mesh.size == 1:
            groups = []
        if self.releasable:
            self._update = arrival or self._update
            self._arrival = arrival or self._arrival  # without an update, an earlier one may still be on its way
            for group in groups:  # persistent groups of a released unit: they must be whole before anyone looks
                group.publish().wait()
        elif groups or arrival is not None:
            self.wait()
            self._move(Residency.UNSHARDING)
            released.release(self._parameters(self.trainable))
            self._update, self._is_hidden = arrival, False
            self._pending = [Work(_after(arrival, groups))] if arrival else [group.publish() for group in groups]
        return bool(groups)

    def request_values(self, parameter: nn.Parameter, wanted_by: str) -> None:
        """Called by the guard: somebody wants the values of a parameter that is away."""
        self.revoke_speculation()
        if self.residency is Residency.UNSHARDING:
            is_fetched = any(parameter is other for other in self._parameters(self.releasable))
            self.wait()
            if is_fetched and self.fetch is not None:
                self.fetch(self)  # nobody else holds what was only prefetched
        if released.is_released(parameter) and not (self.fetch is not None and self.fetch(self)):
            raise ReleasedParameterError(
                f"'{wanted_by}' needs the values of {self._name_of(parameter)}, but they are released: each rank holds "
                f"only its shard of unit '{self.name}'. Read them inside "
                "`with shardwell.zero.GatheredParameters(parameter):`, change them there with modifier_rank=0, or get "
                "and set all of them with engine.state_dict() and engine.load_state_dict(). In a forward, and in a "
                "loss until its step, they come by themselves."
            )

    def end_request(self, parameter: nn.Parameter) -> None:
        """Whole units stay whole for their holders; there is nothing to undo."""

    def hand_over(self, parameter: nn.Parameter) -> Tensor:
        raise ShardwellError(
            f"parameter {self._name_of(parameter)} belongs to another engine already. Call destroy() of that engine "
            "before the model is handed to initialize again."
        )

    def __reduce__(self) -> Any:
        """A copy of a parameter, or one in a file, belongs to nobody."""
        return type(None), ()

    def open(self) -> None:
        with self._failing_together():
            self.unshard(exact=True)
            self.wait()
            self.take_over_edits()
            self.opened += 1
            self._was_opened = True
            try:
                for group in self.groups if self.opened == 1 else ():
                    group.open_for_writing()
            except BaseException:
                self.close(None)
                raise

    def take_over_edits(self) -> None:
        """Values that were changed by hand are those that whoever looks from now on sees."""
        if self.look is not None:
            self.look()

    def _failing_together(self) -> contextlib.AbstractContextManager[None]:
        return self.groups[0].context.failing_together(f"GatheredParameters of '{self.name or '(root)'}'")

    def close(self, modifier_rank: int | None) -> None:
        fitting: list[bool] = []
        try:
            with self._failing_together():
                self.wait_local_update()  # it was begun while the unit was open, from what was before
                fitting = [edits.bring_home(group, modifier_rank) for group in self.groups]
                for group in self.groups:
                    if modifier_rank is not None:
                        group.write_back(modifier_rank)
                if modifier_rank is not None:
                    self._versions = edits.versions(self._parameters(self.groups))
                elif self.opened == 1 and all(fitting):
                    self._look_for_lost_changes(closely=True)
        finally:
            for group in self.groups if self.opened == 1 else ():
                group.close_for_writing()
            if all(fitting):
                self.opened -= 1
                self.reshard()
            else:
                self.misfit = True  # it stays open, and the engine builds it anew before it is used again

    def _name_of(self, parameter: nn.Parameter) -> str:
        for group in self.groups:
            for slot, candidate in zip(group.layout.slots, group.parameters, strict=True):
                if candidate is parameter:
                    return f"'{slot.name}' {tuple(slot.shape)}"
        return "a parameter"

    @staticmethod
    def _parameters(groups: list[ShardedGroup]) -> list[nn.Parameter]:
        if len(groups) == 1:
            return groups[0].parameters
        return [parameter for group in groups for parameter in group.parameters]


def _after(arrival: PendingUpdate, groups: list[ShardedGroup]) -> Callable[[], None]:
    """Wait for an update, then for the others to be sent it."""

    def finish() -> None:
        arrival.wait()
        for pending in [group.publish() for group in groups]:
            pending.wait()

    return finish
