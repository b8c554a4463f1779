"""The smallest change that makes a plan fit: what is tried, from what costs nothing to what costs most.

Most changes do not help, which one simulation of a few blocks shows. Of ranks that grow, in number or along the tensor
axis, each step takes less memory than the one before: the first that may fit is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwell.errors import ShardwellError
from shardwell.memory import Tier
from shardwell.memory.machine import SimulatedMachine
from shardwell.plan.axes import with_axes
from shardwell.plan.estimate import without_kept
from shardwell.plan.models import PlanModel
from shardwell.plan.report import PlanReport

_MOST_NODES = 4096
_AXES = (("tensor_parallel", "autotp_size"), ("pipeline", "stages"))


@dataclass(frozen=True)
class PlanChoice:
    """A configuration on a machine, and in words what it changes."""

    words: str
    config: dict[str, Any]
    machine: SimulatedMachine
    recomputes: bool

    def without_time(self) -> PlanChoice:
        """Return the choice on a machine without speeds: whether it fits takes no simulation of time."""
        return replace(self, machine=replace(self.machine, speeds=None))


@dataclass(frozen=True)
class FittingChange:
    """A search for the smallest change: a model, the tokens of a sequence, and where drives would be."""

    model: PlanModel
    sequence: int
    nvme_path: str = "/nvme"

    def smallest(self, first: PlanChoice, report: PlanReport | None = None) -> tuple[PlanChoice, PlanReport] | None:
        """Return the first change that fits, and its plan; None if none of those that are tried does.

        `report`: the plan of `first`. If its largest unit alone has no room, nothing helps but to cut tensors.
        """
        first, per_node = first.without_time(), first.machine.local_world_size(first.machine.ranks.size)
        has_room_for_units = report is None or report.costs.largest_unit[1] <= report.device_room
        before, may_fit = None, False
        for choice in changes(first, self.nvme_path) if has_room_for_units else ():
            bare = without_kept(choice.config), choice.recomputes
            if bare != before:  # a few blocks are looked at with nothing kept above
                before, may_fit = bare, self._may_fit(choice)
            if may_fit and (found := self._report(choice)) is not None:
                return choice, found
        families = [_more_tensor_ranks(first, per_node)] if self.model.has_choices else []
        families += [_more_ranks(first, per_node)] if has_room_for_units else []
        for family in families:
            may_any = bool(family) and self._may_fit(family[-1])
            begin = bisect_left(family, True, key=self._may_fit) if may_any else len(family)
            for choice in family[begin:]:
                if (found := self._report(choice)) is not None:
                    return choice, found
        return None

    def _may_fit(self, choice: PlanChoice) -> bool:
        try:
            return self.model.may_fit(choice.config, choice.machine, self.sequence, choice.recomputes)
        except ShardwellError:  # the configuration or the engine refuses it
            return False

    def _report(self, choice: PlanChoice) -> PlanReport | None:
        """Return the plan of a choice that fits: two depths must say so, then all that a plan is made of."""
        for verified in (False, True):
            try:
                found = self.model.report(
                    choice.config, choice.machine, self.sequence, choice.recomputes, verified=verified
                )
            except ShardwellError:
                return None
            if not found.fits:
                return None
        return found


def changes(first: PlanChoice, nvme_path: str) -> Iterator[PlanChoice]:
    """Yield changes to a configuration, each on top of those before: shard more, recompute, offload."""
    zero, now = first.config.get("zero_optimization", {}), first
    has_ranks = first.machine.ranks.size > 1
    for stage in range(zero.get("stage", 0) + 1, 4) if has_ranks else ():
        now = _with(first, f"stage {stage}", stage=stage)
        yield now
    if not now.recomputes:
        now = replace(now, words=_and(now, "recompute blocks (activation checkpointing)"), recomputes=True)
        yield now
    for words, block in (
        ("optimizer state on the host", {"offload_optimizer": {"device": "cpu"}}),
        ("parameters on the host", {"offload_param": {"device": "cpu"}}),
        ("optimizer state on NVMe", {"offload_optimizer": {"device": "nvme", "nvme_path": nvme_path}}),
        ("parameters on NVMe", {"offload_param": {"device": "nvme", "nvme_path": nvme_path}}),
    ):
        if "offload_param" in block and (all_below := without_kept(now.config)) != now.config:
            now = replace(now, words=_and(now, "all of it (ratio 1.0)"), config=all_below)
            yield now
        if _depth(block) > _depth(zero, *block):
            least = 3 if "offload_param" in block else 1
            deeper = max(least, now.config.get("zero_optimization", {}).get("stage", 0))
            now = _with(now, _and(now, words), stage=deeper, **block)
            yield now


def _more_tensor_ranks(first: PlanChoice, per_node: int) -> list[PlanChoice]:
    """Return tensor axes inside a node, each twice the one before; none if there is one already."""
    if any((first.config.get(block) or {}).get(key, 1) != 1 for block, key in _AXES):
        return []
    sharded = _everything_sharded(first)
    degrees = [2**power for power in range(1, per_node.bit_length()) if per_node % 2**power == 0]
    return [
        replace(
            sharded,
            words=f"a tensor axis of {degree} ranks (--tp {degree}), stage 3, blocks recomputed",
            config=with_axes(sharded.config, tensor=degree),
        )
        for degree in degrees
    ]


def _more_ranks(first: PlanChoice, per_node: int) -> list[PlanChoice]:
    """Return more nodes, each time twice as many."""
    found, size = [], first.machine.ranks.size
    while size < _MOST_NODES * per_node:
        size *= 2
        machine = replace(first.machine, ranks=replace(first.machine.ranks, size=size, per_node=per_node))
        words = f"{size:,} GPUs, stage 3, blocks recomputed"
        found.append(replace(_everything_sharded(first), words=words, machine=machine))
    return found


def _everything_sharded(first: PlanChoice) -> PlanChoice:
    """Return stage 3 with recomputed blocks; the rows of a step follow from the ranks."""
    free = {key: value for key, value in first.config.items() if key != "train_batch_size"}
    return replace(_with(replace(first, config=free), "", stage=3), recomputes=True)


def _and(choice: PlanChoice, words: str) -> str:
    return f"{choice.words}, {words}" if choice.words else words


def _with(choice: PlanChoice, words: str, **block: Any) -> PlanChoice:
    zero = {**choice.config.get("zero_optimization", {}), **block}
    return replace(choice, words=words, config={**choice.config, "zero_optimization": zero})


def _depth(zero: dict[str, Any], *keys: str) -> int:
    """Return how deep the deepest tier of these blocks is, of all if none is named."""
    depths = {tier.offload_device: depth for depth, tier in enumerate(Tier)}
    return max((depths[(zero.get(key) or {}).get("device", "none")] for key in keys or zero), default=0)
