"""The tier that each unit's states are stored on, from the bytes that they need and the bytes that are free.

    device | unit 0 | unit 1 |
    host                     | unit 2 | unit 3 | unit 4 |
    disk                                                | unit 5 | unit 6 |

This is pure arithmetic over the units in forward order: the first units are updated last and needed first, so they are
placed highest. All bytes are those of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwell.memory import Tier
from shardwell.memory.statistics import human
from shardwell.sharding.model_states import TIERS_DOWN, Bytes, TierPlacement, total


def tier_ladder(deepest: TierPlacement) -> list[TierPlacement]:
    """Return the placements that units may have, from the device down.

    Parameters and optimizer state move down together, each as far as allowed. The last step down is that of the
    gradients of state on disk, if they may be stored there.
    """
    limits = [TIERS_DOWN.index(tier) for tier in (deepest.parameters, deepest.optimizer)]
    found = [TierPlacement(*(TIERS_DOWN[min(rung, limit)] for limit in limits)) for rung in range(max(limits) + 1)]
    return [*found, deepest] if deepest.gradients is deepest.optimizer is Tier.DISK else found


@dataclass(frozen=True)
class PlacementPlan:
    """A placement for each unit, as an index into the ladder, and the bytes that all of it needs."""

    rungs: list[int]
    needed: Bytes

    def fits(self, free: Mapping[Tier, float]) -> bool:
        """Return whether the plan fits into the free bytes of each tier."""
        return all(size <= free.get(tier, 0) for tier, size in self.needed.items())


def plan(needs: Sequence[Sequence[Bytes]], buffers: Sequence[Bytes], free: Mapping[Tier, float]) -> PlacementPlan:
    """Place units as high as they fit, the first ones highest, and no lower than necessary.

    `needs` has the bytes of each unit with each placement of the ladder, `buffers` the staging memory if a placement is
    the lowest one in use. The returned plan fits, or there is none that does.
    """
    for depth in range(len(buffers)):
        found = _down_to(depth, needs, buffers[depth], free)
        if found.fits(free):
            break
    return found


def _down_to(depth: int, needs: Sequence[Sequence[Bytes]], buffers: Bytes, free: Mapping[Tier, float]) -> PlacementPlan:
    """Start with all units at the lowest placement, and raise them from the first one on while there is room above."""
    needed = total([buffers, *(unit[depth] for unit in needs)])
    rungs = [depth] * len(needs)
    first = 0
    for rung in range(depth):
        while first < len(needs):
            after = total([needed, needs[first][rung]])
            after.subtract(needs[first][depth])
            if any(size > max(needed[tier], free.get(tier, 0)) for tier, size in after.items()):
                break
            needed, rungs[first] = after, rung
            first += 1
    return PlacementPlan(rungs, needed)


def table(needed: Bytes, free: Mapping[Tier, float]) -> str:
    """Describe what is needed and free on each tier in use."""
    used = [tier for tier in Tier if needed[tier] > 0]
    return ", ".join(f"{tier.value} {human(needed[tier])} (free {human(free.get(tier, 0))})" for tier in used)
