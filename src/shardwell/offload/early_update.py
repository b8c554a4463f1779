"""Updates before the norm: units whose commit policy is immediate are stepped while backward still runs.

An immediate update is final, and frees the gradients. It gives the bits of a step after the norm, because it is the
same step. What is updated before a step is not published until that step, so this file also keeps the units whose
update has begun, on the device or on the host, and what code that needs such a unit has to do first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwell.errors import ShardwellError
from shardwell.offload.auto_commit import AutoCommit
from shardwell.offload.host_updates import HostUpdateQueue
from shardwell.optim.executor import InlineExecutor
from shardwell.optim.grad_norm import norm_of, sum_of_squares
from shardwell.optim.loss_scale import LossScale
from shardwell.optim.param_slices import ParamSlice, ParamSlices
from shardwell.sharding import EngineContext, Unit
from shardwell.sharding.pending_update import PendingUpdate
from shardwell.sharding.spec import CommitPolicy

Norm = Tensor | Callable[[], float]  # or a function that waits for it

_MOST_NAMES = 8  # unit names in a message


def commit_of(unit: Unit) -> CommitPolicy:
    """Return the commit policy of a unit: that of its groups that are not persistent, if there are any."""
    commits = {group.spec.commit for group in unit.trainable} - {CommitPolicy.AFTER_NORM}
    return next(iter(commits), CommitPolicy.AFTER_NORM)


def has_all_gradients(unit: Unit) -> bool:
    """Return whether this rank has all gradients of a unit that the boundary brings."""
    return not unit.use.in_backward and all(group.gradients.is_complete for group in unit.trainable)


class EarlyExecutor(InlineExecutor):
    """Steps units with the inner torch optimizer, as their commit policy says: immediately, or after the norm.

    With a queue of host updates it steps the groups that stay on the device, and manages when all units are published.
    """

    def __init__(
        self,
        inner: Optimizer,
        slices: ParamSlices,
        context: EngineContext,
        scale: LossScale,
        queue: HostUpdateQueue | None = None,
    ) -> None:
        super().__init__(inner, slices, context, scale)
        self.auto = AutoCommit(inner, context, slices.units)
        self.summed_with_norm = [self.auto] if self.auto.is_on else []
        self.unpublished = UnpublishedUnits(self.auto, queue)
        self.report = PartialUpdateReport(context, slices)
        self._queue = queue
        # by unit that was updated at this boundary: the norms of its gradients, which are gone
        self.early_norms: dict[int, list[tuple[Tensor, bool]]] = {}

    # ------------------------------------------------------------------------------------------------- backward

    def reduced(self, unit: Unit, at_boundary: bool) -> None:
        if at_boundary:
            for group in unit.trainable if commit_of(unit) is not CommitPolicy.AFTER_NORM else ():
                group.gradients.wait()  # full gradients may still be in their all-gather
            self.begin_update(unit, is_complete=has_all_gradients(unit))

    def begin_update(self, unit: Unit, *, is_complete: bool) -> None:
        """Step what is on the device of a unit if it need not wait, and let users of the unit wait for its update."""
        if is_complete and commit_of(unit) is CommitPolicy.IMMEDIATE:
            self._update_early(unit)
        self.unpublished.begin(unit, is_complete=is_complete)

    def _update_early(self, unit: Unit) -> None:
        """Step a unit before the norm is known, unless its own gradients are not finite, and free its gradients."""
        mine = [shard for shard in self.slices.of(unit) if shard.group not in self.elsewhere]
        shards = [shard for shard in mine if shard.group.gradients.result is not None]
        if not shards:
            return
        if unit.index in self.early_norms:
            raise ShardwellError(
                f"unit '{unit.name}' got another gradient after its update at once; commit after the norm"
            )
        norms = self.early_norms[unit.index] = [norm_of(shard) for shard in shards]
        if self._may_update([norm for norm, _ in norms]):
            self._update([unit], None, set())
        for group in dict.fromkeys(shard.group for shard in shards):
            self._context.temporary.free(group.gradients.reduced.discard())

    def _may_update(self, norms: list[Tensor]) -> bool:
        """Return whether to update a unit; where the kernels read the overflow flag, the host does not wait."""
        if self._context.device.is_meta:
            return True
        is_finite = torch.isfinite(sum_of_squares(norms, self._context.device))
        if self.vetoes_on_device:
            self.inner.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
            return True
        return bool(is_finite)

    def gradients_read(self, unit: Unit) -> None:
        self.auto.gradients_read(unit)

    def gradients_change(self, unit: Unit) -> None:
        self.auto.gradients_read(unit)
        self.unpublished.revoke(unit)

    def gradients_dropped(self, what: str) -> None:
        self.auto.notice(what)

    def stop_watching(self) -> None:
        self.auto.stop_watching()

    def is_updated_early(self, unit: Unit) -> bool:
        return self.auto.has_begun(unit)

    # ----------------------------------------------------------------------------------------------------- step

    def norms(self) -> Iterator[tuple[Tensor, bool]]:
        self.report.note(self.norms_at_once)
        for unit in self.slices.units:
            if unit.index in self.early_norms:
                yield from self.early_norms[unit.index]
                continue
            for shard in self.slices.of(unit):
                if shard.group.gradients.result is not None:
                    yield norm_of(shard)

    def norms_at_once(self, unit: Unit, shard: ParamSlice) -> list[Norm] | None:
        """Return the norms that allow an immediate update of a slice if they are finite; None if it waits."""
        norms = self.early_norms.get(unit.index)
        return None if norms is None else [norm for norm, _ in norms]

    def step(self, norm: Tensor, clip: Tensor | None, unseen: set[str]) -> Iterator[tuple[Unit, PendingUpdate | None]]:
        self.auto.check_options()
        for unit in self.update_rest(clip, unseen):
            yield unit, None
        self.auto.end_step()

    def update_rest(self, clip: Tensor | None, unseen: set[str]) -> Iterator[Unit]:
        """Step what was not stepped before the norm, and yield all units, which the caller publishes."""
        for chunk in self.slices.chunks:
            self._update([unit for unit in chunk if unit.index not in self.early_norms], clip, unseen)
            for unit in chunk:
                self.unpublished.remove(unit)
                yield unit

    def skip_step(self) -> None:
        self.auto.check_options()
        self.auto.end_step()

    def drop_gradients(self, was_used: bool | Tensor, *, together: bool) -> None:
        self.early_norms = {}
        self.unpublished.give_up(together=together)
        if self._queue is not None:
            self._queue.forget_gradients()
        super().drop_gradients(was_used, together=together)
        self.auto.forget()

    def describe_partial(self, *, is_late: bool) -> tuple[bool, str]:
        return self.report(is_late=is_late)

    # ---------------------------------------------------------------------------------------------------- units

    def enter(self, unit: Unit) -> None:
        self.auto.enter(unit)

    def leave(self, unit: Unit) -> None:
        self.auto.leave(unit)


# ----------------------------------------------------------------------------------------------- pending updates


@dataclass(frozen=True)
class PublishAfter:
    """An update that no step has published: code that needs the unit waits for it and publishes it to all ranks."""

    unit: Unit
    arrival: PendingUpdate | None  # None: the update ran on the training thread, or on other ranks only

    @property
    def is_done(self) -> bool:
        return self.arrival is None or self.arrival.is_done

    def wait_local(self) -> None:
        if self.arrival is not None:
            self.arrival.wait_local()

    def wait(self) -> None:
        self.wait_local()
        self.unit.publish()


@dataclass(frozen=True)
class Revocable:
    """A speculative update on the host: code that needs the unit revokes it and sees the values from before.

    A rank can do so alone: nothing was published, and the result of the step is the same.
    """

    unit: Unit
    revoke: Callable[[Unit], None]

    is_done = False

    def wait_local(self) -> None:
        self.revoke(self.unit)

    def wait(self) -> None:
        self.revoke(self.unit)


class NothingPending:
    """Nothing to wait for, in place of an update of other ranks, so that all ranks defer publishing alike."""

    is_done = True

    def wait_local(self) -> None: ...

    def wait(self) -> None: ...


class UnpublishedUnits:
    """The units with updates that have begun and are not published yet. All ranks have the same ones."""

    def __init__(self, auto: AutoCommit, queue: HostUpdateQueue | None) -> None:
        """`queue` has the updates on the host, if there are any."""
        self._auto, self._queue = auto, queue
        self._units: dict[int, Unit] = {}

    def begin(self, unit: Unit, *, is_complete: bool) -> None:
        """Note that a unit's gradients were reduced, and that it may have been updated before the norm."""
        commit, pending = commit_of(unit), self._pending(unit)
        if self._auto.watch(unit, pending, is_complete=is_complete):
            if commit is CommitPolicy.IMMEDIATE:
                self._note(unit)
                unit.updates.is_early = True
        elif commit is CommitPolicy.SPECULATIVE and self._queue is not None:
            self._note(unit)
            unit.await_update(Revocable(unit, self.revoke), hides=True)
        elif commit is CommitPolicy.IMMEDIATE:
            self.add(unit)

    def _pending(self, unit: Unit) -> PendingUpdate | None:
        return None if self._queue is None else self._queue.arrival(unit)

    def revoke(self, unit: Unit) -> None:
        """Revoke a unit's early update, unless it is final, because the unit is read before the step."""
        if self._queue is not None:
            self._queue.revoke(unit)

    def add(self, unit: Unit) -> None:
        """Note an update that has begun: reads wait for it, and the secondary shard of old values is dropped."""
        self._note(unit)
        unit.updates.is_early = True
        unit.await_update(PublishAfter(unit, self._pending(unit)))

    def _note(self, unit: Unit) -> None:
        for group in unit.trainable:
            group.invalidate_secondary()
        self._units[unit.index] = unit

    def remove(self, unit: Unit) -> None:
        """Remove a unit that the caller publishes now."""
        if self._units.pop(unit.index, None) is not None:
            unit.updates.is_early = False
            unit.await_update(None)

    def give_up(self, *, together: bool) -> None:
        """Give up on a step that publishes the units; speculative updates are not applied.

        With `together` they are published here. Otherwise, because other ranks do not come here, code that needs them
        does it.
        """
        units, self._units = self._units, {}
        for unit in units.values():
            unit.updates.is_early = False
            if self._queue is not None:
                self._queue.give_up(unit)
            pending = self._pending(unit)
            unit.await_update(None if together else PublishAfter(unit, pending))
            if together:
                unit.publish(pending or NothingPending())


# ---------------------------------------------------------------------------------------------------- the report


class PartialUpdateReport:
    """A report on a step whose norm is not finite: which units were updated immediately, fully or in part.

    A rank updates its part of a unit if its own part of the gradients is finite. The parts of other ranks may not be.
    """

    def __init__(self, context: EngineContext, slices: ParamSlices) -> None:
        self._context, self._slices = context, slices
        self._noted: list[tuple[str, list[list[Norm] | None]]] = []  # by unit: see `note`, for each slice

    def note(self, norms_at_once: Callable[[Unit, ParamSlice], list[Norm] | None]) -> None:
        """Record the start of a step: a slice was updated immediately if its norms are finite; None: it waits."""
        units = self._slices.units
        commits = {group.spec.commit for unit in units for group in unit.trainable}
        self._noted = [
            (unit.name or "(root)", [norms_at_once(unit, s) for s in self._slices.of(unit) if s.label >= 0])
            for unit in (units if CommitPolicy.IMMEDIATE in commits else ())
        ]

    def __call__(self, *, is_late: bool) -> tuple[bool, str]:
        """Return whether all values are as before the step, and a sentence that says so.

        If anything may have been updated, all ranks must call it. `is_late`: a backward may have updated more since
        then.
        """
        names: dict[tuple[bool, bool], list[str]] = {}
        for (name, _), left, updated in zip(self._noted, *self._counts(), strict=True):
            names.setdefault((left > 0, updated > 0), []).append(name)
        ways = {(False, True): "updated", (True, True): "updated in part", (True, False): "as before"}
        if not any(updated for _, updated in names) and not (names and is_late):
            return True, "the step was not applied and parameters and optimizer state are as before"
        said = "; ".join(f"{way}: {_listed(names[key])}" for key, way in ways.items() if key in names)
        more = ", nor are those of backwards since then" if is_late else ""
        return False, f"updates at once are not taken back ({said}){more}"

    def _counts(self) -> tuple[list[float], list[float]]:
        """Return for each unit the slices that are as before, and the updated ones, over the ranks that have it."""
        counts = torch.zeros(2, len(self._noted), dtype=torch.float64, device="cpu")
        for number, (_, shards) in enumerate(self._noted):
            for norms in shards:
                is_updated = norms is not None and all(math.isfinite(_known(norm)) for norm in norms)
                counts[int(is_updated), number] += 1
        counts = counts.to(self._context.device.torch_device)
        if self._noted:
            self._context.roles.stage.all_reduce_sum(counts, "AFTERMATH")
        left, updated = counts.tolist()
        return left, updated


def _known(norm: Norm) -> float:
    return float(norm if isinstance(norm, Tensor) else norm())


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more units"
