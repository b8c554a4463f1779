"""The parts of a unit's state: what uses it now, its updates, and which of its groups are treated how."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shardwell.parallel.in_flight import LeftInFlight
from shardwell.sharding.group import ShardedGroup
from shardwell.sharding.pending_update import PendingUpdate
from shardwell.sharding.spec import CommitPolicy


@dataclass(slots=True)
class UnitUse:
    """The uses of a unit that hold it unsharded now."""

    in_forward: int = 0  # running forwards
    in_parts: int = 0  # running forwards of parts of its module
    in_backward: bool = False
    num_contexts: int = 0  # GatheredParameters contexts
    is_retained: bool = False  # code outside its module may still use it
    has_new_gradients: bool = False  # gradients arrived in this backward
    task: int = -1  # the autograd graph task that used it last: when that ends, so does its backward


@dataclass(slots=True)
class UnitUpdates:
    """The optimizer updates of a unit. `is_awaited` and `is_early` are the same on all ranks."""

    count: int = 0  # updates since the unit was built
    pending: PendingUpdate | None = None  # an update in flight
    is_awaited: bool = False  # nothing has waited for that update since it was queued
    is_early: bool = False  # of a step: the update has started on some ranks at least
    is_watched: bool = False  # a use between a backward and its step is detected
    is_hidden: bool = False  # unsharded parameters are released: they may hold values that are never committed
    published: LeftInFlight | None = None  # the all-gathers of the last step, at stages 1 and 2


@dataclass(frozen=True)
class GroupSets:
    """The parameters and groups of a unit, by how they are treated."""

    parameters: list[nn.Parameter]
    resharding_parameters: list[nn.Parameter]
    unsharded: list[nn.Parameter]  # trainable parameters that are never resharded
    with_values: list[nn.Parameter]  # those of them that are not empty
    published: list[ShardedGroup]  # groups whose updates are all-gathered after a step
    offloaded: list[ShardedGroup]  # resharded groups with state below the device
    has_codec: bool  # an all-gather quantises
    joins_gathers: bool  # several groups are all-gathered, as one collective
    joins_reductions: bool  # several groups get gradients, which are reduce-scattered as one collective
    is_speculative: bool  # updates are computed before it is known that they may be committed

    @classmethod
    def of(cls, groups: list[ShardedGroup], trainable: list[ShardedGroup], resharding: list[ShardedGroup]) -> GroupSets:
        """Return the sets of a unit with these groups, of which some are trainable and some are resharded."""
        unsharded = [p for group in trainable if group not in resharding for p in group.parameters]
        return cls(
            [parameter for group in groups for parameter in group.parameters],
            [parameter for group in resharding for parameter in group.parameters],
            unsharded,
            [parameter for parameter in unsharded if parameter.numel()],
            [group for group in trainable if group.spec.publishes and group.context.roles.shard.rank_group.size > 1],
            [group for group in resharding if group.offloaded is not None],
            any(group.spec.all_gather_codec for group in resharding),
            _join(resharding),
            _join(trainable),
            any(group.spec.commit is CommitPolicy.SPECULATIVE for group in trainable),
        )


def _join(groups: list[ShardedGroup]) -> bool:
    """Return whether the collectives of groups are started as one: there are several groups, and several ranks."""
    return len(groups) > 1 and any(group.context.roles.shard.rank_group.size > 1 for group in groups)
