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
    """An optimizer update that is in flight."""

    @property
    def is_done(self) -> bool:
        """Whether the host has done its part."""

    def wait_local(self) -> None:
        """Wait for the update without any collective, as one rank can alone."""

    def wait(self) -> None:
        """Wait for the update, and run the collectives that follow it on all ranks."""


class FailedUpdate:
    """A change of a unit's values that failed: every later use of the unit raises an error."""

    is_done = True

    def __init__(self, what: str, error: Exception) -> None:
        self._words = (
            f"{what} failed, so that parameters and optimizer state may be updated in part: {error}. This engine "
            "cannot be used any more: start again, from the latest checkpoint."
        )

    def wait_local(self) -> None:
        """Raise the error."""
        raise ShardwellError(self._words)

    def wait(self) -> None:
        """Raise the error."""
        raise ShardwellError(self._words)


class Residency(enum.Enum):
    """Whether the parameters of a unit are sharded, being all-gathered, or unsharded."""

    SHARDED = "released"
    UNSHARDING = "gathering"
    UNSHARDED = "whole"

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere


_ALLOWED = {
    Residency.SHARDED: {Residency.UNSHARDING},
    Residency.UNSHARDING: {Residency.UNSHARDED, Residency.SHARDED},  # the latter: the all-gather failed
    Residency.UNSHARDED: {Residency.SHARDED, Residency.UNSHARDING},  # the latter: a publish
}


_CLOSE_LOOKS = 4  # reshards that compare values: a forward that changes its own parameters does so from the start


class Unit:
    """A module and its groups, with their residency."""

    def __init__(self, index: int, one: UnitSpec, groups: list[ShardedGroup]) -> None:
        self.index, self.name, self.module, self.groups = index, one.name, one.module, groups
        self.is_brief = one.is_tile  # recomputation does not keep it for its backward: it is all-gathered again
        self.is_named = one.is_named  # as a leaf by the user: ranks may use different parts of it, or none
        self.trainable = [group for group in groups if group.trainable]
        self.keeps_frozen = False  # frozen groups stay unsharded after their first all-gather
        self._sort()
        self.residency = Residency.SHARDED if self.releasable else Residency.UNSHARDED
        self.in_forward = 0  # running forwards that hold it
        self.inside = 0  # running forwards of parts of it
        self.num_updates = 0  # updates of its parameters since it was built
        self.in_backward = False
        self.opened = 0  # GatheredParameters contexts that hold it
        self._was_opened = False  # since its all-gather: the user may have views of it
        self._is_exact = False  # the all-gather was not quantised
        self._keeps_quiet = False  # the warning about views that the user keeps was given
        self.misfit = False  # a parameter was given another shape
        self._versions = edits.versions(self._parameters(groups))
        self._has_warned = False  # about changes that are lost
        self.is_retained = False  # code outside its module may still use it
        self._was_lent = False  # retained since its all-gather
        self._gathered_at = 0  # `num_updates` at the all-gather
        self._num_close_looks = 0  # reshards; the first `_CLOSE_LOOKS` of them compare values
        self.fetch: Callable[[Unit], bool] | None = None  # retains the unit; false if that is not allowed now
        self.average: Callable[[Unit], None] | None = None  # averages its gradients before the boundary
        # takes over gradients that the user has set or deleted
        self.take_over_gradients: Callable[[], None] | None = None
        self.look: Callable[[], None] | None = None  # checks all units for values that were changed by hand
        self.optimizer: Any = None  # the optimizer that steps it
        # takes over an optimizer of the user that was not passed to `initialize`
        self.adopt: Callable[[Any], None] | None = None
        self.has_news = False  # gradients arrived in this backward
        self.task = -1  # the autograd graph task it was last used in: when that ends, so does its backward
        self._pending: list[Work] = []
        self._arrival: PendingUpdate | None = None  # an update that nothing has waited for yet
        self._update: PendingUpdate | None = None  # the same, and also that of a unit whose publish waits for it
        self.is_ahead = False  # of a step: its update has started on some ranks at least. The same on all ranks
        self.is_watched = False  # a use between a backward and its step is detected
        self._is_hidden = False  # unsharded parameters are released: they may hold values that are never committed
        for group in groups:
            for parameter in group.parameters:
                released.keep(parameter, self)

    def _sort(self) -> None:
        is_whole = [group for group in self.trainable if not group.row.reshards or group.stays_whole]
        self._resting = [parameter for group in is_whole for parameter in group.parameters if parameter.numel()]
        self.releasable = [group for group in self.groups if group.row.reshards and not group.stays_whole]
        self.numel = sum(group.layout.padded for group in self.releasable)  # elements that an all-gather fills

    @property
    def is_held(self) -> bool:
        """Whether anything needs the unit unsharded."""
        return bool(self.in_forward or self.inside or self.in_backward or self.opened or self.is_retained)

    @property
    def is_seen(self) -> bool:
        """Whether the unit was resharded while views of it exist, so that its memory stays."""
        return any(group.is_seen for group in self.releasable)

    def free_unseen(self) -> None:
        """Free the memory of a resharded unit that no view uses any more."""
        for group in self.releasable if self.residency is Residency.SHARDED else ():
            group.reshard()

    def _move(self, residency: Residency) -> None:
        assert residency in _ALLOWED[self.residency], f"{self.name}: {self.residency} -> {residency}"
        self.residency = residency

    # The methods below are idempotent: a second call in the same state does nothing, and its result says so.

    def unshard(self, *, exact: bool = False) -> bool:
        """Start the all-gather; true if it was started.

        `exact`: all-gather the stored values, also if the spec quantises them for the all-gather.
        """
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
        """Warn once that a view of its parameters is kept."""
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
        """Reshard the unit if an all-gather fails, so that the next one starts anew."""
        try:
            yield
        except BaseException:
            pending, self._pending = self._pending, []
            for one in pending:
                with contextlib.suppress(Exception):  # the first error is the one that counts
                    one.wait()
            if self.releasable:
                # copies that were started may still write
                self.releasable[0].context.device.all_gather_stream.record().wait()
                self._drop()
            raise

    def prefetch_from_disk(self) -> bool:
        """Start to read shards on disk, because the all-gather is near, unless an update has to come first."""
        return (
            self._rests and sum(group.prefetch_from_disk() for group in self.releasable) > 0
        )  # all of them, not only up to the first

    def prefetch_to_device(self) -> bool:
        """Start to copy shards below the device, for the all-gather after the next one, unless an update is due."""
        return self._rests and sum(group.prefetch_to_device() for group in self.releasable) > 0

    @property
    def _rests(self) -> bool:
        return self.residency is Residency.SHARDED and self.is_up_to_date

    @property
    def can_prefetch_to_device(self) -> bool:
        """Whether a shard can be copied to the device ahead of its all-gather."""
        return any(group.shard is not None and group.shard.is_liftable for group in self.releasable)

    @property
    def is_on_device(self) -> bool:
        """Whether a prefetched copy of a shard is on the device, or in flight to it."""
        return any(group.shard is not None and group.shard.is_on_device for group in self.releasable)

    def cancel_prefetch(self) -> None:
        """Drop prefetched copies: no all-gather is near after all, or the stored values will change."""
        for group in self.releasable:
            group.cancel_prefetch()

    def wait(self) -> None:
        """Wait for an all-gather, a publish or an update that is in flight."""
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
        """Whether nothing has waited for the unit since its update was queued. The same on all ranks."""
        return self._arrival is not None

    @property
    def is_up_to_date(self) -> bool:
        """Whether a use of the unit would not wait for an update now.

        The answer differs between ranks: no decision that leads to a collective may depend on it.
        """
        return self._arrival is None or self._arrival.is_done

    def await_update(self, arrival: PendingUpdate | None, *, hides: bool = False) -> None:
        """Let users of the unit wait for an update that was started before it is published. None: no update any more.

        `hides`: a read of an unsharded parameter that the update writes to waits, too.
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
        """Whether updates of it start before it is known that they may be committed."""
        return self.is_watched or any(group.row.commit is CommitPolicy.SPECULATIVE for group in self.trainable)

    def revoke_speculation(self) -> None:
        """Show the committed values of this rank's part: an update that may not be committed is undone."""
        if self._is_hidden:
            self.wait_local_update()

    def _show(self) -> None:
        if self._is_hidden:
            self._is_hidden = False
            released.restore(self._parameters(self._resting_whole))

    def wait_local_update(self) -> None:
        """Wait for the update of this rank's part, without the collectives that `wait` may start."""
        if self._update is not None:
            with self._failing_for_good():
                self._update.wait_local()
            self._show()

    def _arrive(self) -> None:
        if self._arrival is not None:
            arrival, self._arrival = self._arrival, None
            with self._failing_for_good():
                arrival.wait()
            self._show()

    def _after(self, arrival: PendingUpdate, groups: list[ShardedGroup]) -> Callable[[], None]:
        """Return a function that waits for an update and then publishes it."""

        def finish() -> None:
            with self._failing_for_good():
                arrival.wait()
            for pending in [group.publish() for group in groups]:
                pending.wait()

        return finish

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
        failed = self._update if isinstance(self._update, FailedUpdate) else FailedUpdate(what, error)
        self._arrival = self._update = failed  # the first error stays

    def reshard(self) -> bool:
        """Free the unsharded parameters unless the unit is held; true if anything was freed."""
        if not self.releasable or self.is_held or self.residency is Residency.SHARDED:
            return False
        # a caller that reshards does not read the values
        if self.residency is Residency.UNSHARDING or not self._is_hidden:
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
        """Keep the unit unsharded until the step, for code outside its module."""
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
        """Look for changes of a retained unit before an update hides them."""
        if self._was_lent:
            self._look_for_lost_changes(closely=True)

    def _look_for_lost_changes(self, *, closely: bool) -> None:
        """Warn if unsharded parameters were changed in place, because the change is lost when they are freed.

        Torch does not count changes of `p.data`. `closely`: values are compared with the stored ones.
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
        """Whether only the user can have changed the values since the all-gather, or the stored ones."""
        is_updated = self.num_updates != self._gathered_at or self.is_ahead or self._update is not None
        return self.residency is Residency.UNSHARDED and not is_updated and self._arrival is None

    def note_update(self) -> None:
        """Count a step that changed the parameters: a graph that saved them must not be used any more.

        Torch checks that for parameters that stay unsharded. Released ones are checked where they are read, see
        `SavedView`.
        """
        self.num_updates += 1
        if self._resting:
            torch.autograd.graph.increment_version(self._resting)

    def publish(self, arrival: PendingUpdate | None = None) -> bool:
        """Start the all-gather of the updated slices of groups that stay unsharded; readers wait for it.

        With `arrival` the update itself is still in flight: users of the unit wait for that first.
        """
        groups = [group for group in self.groups if group.row.publishes and group.trainable]
        if groups and groups[0].context.world.mesh.size == 1:
            groups = []
        if self.releasable:
            self._update = arrival or self._update
            self._arrival = arrival or self._arrival  # without an update, an earlier one may still be in flight
            for group in groups:  # persistent groups of a resharded unit: they must be complete before any read
                group.publish().wait()
        elif groups or arrival is not None:
            self.wait()
            self._move(Residency.UNSHARDING)
            released.release(self._parameters(self.trainable))
            self._update, self._is_hidden = arrival, False
            self._pending = [Work(self._after(arrival, groups))] if arrival else [group.publish() for group in groups]
        return bool(groups)

    def request_values(self, parameter: nn.Parameter, wanted_by: str) -> None:
        """Bring back the values of a released parameter; `ReleasedParameter` calls this when they are used."""
        self.revoke_speculation()
        if self.residency is Residency.UNSHARDING:
            is_fetched = any(parameter is other for other in self._parameters(self.releasable))
            self.wait()
            if is_fetched and self.fetch is not None:
                self.fetch(self)  # nothing else holds a unit that was only prefetched
        if released.is_released(parameter) and not (self.fetch is not None and self.fetch(self)):
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
            self.opened += 1
            self._was_opened = True
            try:
                for group in self.groups if self.opened == 1 else ():
                    group.open_for_writing()
            except BaseException:
                self.close(None)
                raise

    def take_over_edits(self) -> None:
        """Take over values that were changed by hand, so that later reads see them."""
        if self.look is not None:
            self.look()

    def _failing_together(self) -> contextlib.AbstractContextManager[None]:
        return self.groups[0].context.failing_together(f"GatheredParameters of '{self.name or '(root)'}'")

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
                self.misfit = True  # it stays open, and the engine rebuilds it before it is used again

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
