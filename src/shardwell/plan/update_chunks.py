"""How many blocks are updated together, by which the peak of a step goes on with the depth.

Small shards are stepped several units at a time, until a chunk has enough elements. The chunks of all blocks follow
from those of a few by the engine's own rule, and so does at which depths the peak of a step is to be looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from shardwell.memory import Tier
from shardwell.optim.param_slices import chunk_lengths
from shardwell.plan.simulation import MOMENTS, StepCosts, along, highest_moment

STEP = f"{MOMENTS[2]} {Tier.DEVICE.value}"
_FEWEST = 4  # blocks beside those of a chunk
_MOST = 128  # blocks that are all simulated: with few of them the peak may be at another instant of the step


@dataclass(frozen=True)
class UpdateChunks:
    """The elements that a rank steps of each unit, in their order, at two depths of which one has a block more."""

    depth: int
    first: tuple[int, ...]
    second: tuple[int, ...]

    def lengths(self, depth: int) -> Counter[int] | None:
        """Return how many chunks have so many units, with so many blocks; None if that cannot be said."""
        units = self._units(depth)
        return None if units is None else Counter(chunk_lengths(units))

    def most(self, depth: int) -> int | None:
        """Return the most elements of a chunk, with so many blocks; None if that cannot be said."""
        units = self._units(depth)
        if units is None:
            return None
        ends = list(accumulate(chunk_lengths(units), initial=0))
        return max((sum(units[begin:end]) for begin, end in pairwise(ends)), default=0)

    def _units(self, depth: int) -> list[int] | None:
        """Return the elements that a rank steps of each unit, with so many blocks."""
        if len(self.second) != len(self.first) + 1:
            return None
        ((block, _),) = Counter(self.second).most_common(1)
        place = self.second.index(block)
        others = [*self.second[:place], *self.second[place + 1 :]]
        grown = [
            one + (other - one) * (depth - self.depth) for one, other in zip(self.first, others, strict=True)
        ]  # such as the small parameters of all blocks that are one unit
        return [*grown[:place], *[block] * (depth - self.depth), *grown[place:]]

    def is_plain(self, layers: int) -> bool:
        """Return whether each block is updated alone, so that depths of a few blocks tell of all."""
        few, all_of_them = self.lengths(self.depth), self.lengths(layers)
        return few is not None and all_of_them is not None and all_of_them - few == Counter({1: layers - self.depth})

    def depths(self, layers: int) -> tuple[int, ...]:
        """Return the depth of all blocks; of very many two that are whole chunks apart from each other and from all."""
        ((block, _),) = Counter(self.second).most_common(1)
        (together,) = chunk_lengths([block] * layers)[:1]
        first = together + _FEWEST + (layers - together - _FEWEST) % together
        found = [self.lengths(one) for one in (first, first + together, layers)]
        if layers <= _MOST or first + together >= layers or any(one is None for one in found):
            return (layers,)
        one, other, whole = (each or Counter() for each in found)
        number = (layers - first) // together
        is_repeated = other - one == Counter({together: 1}) and whole - one == Counter({together: number})
        return (first, first + together) if is_repeated else (layers,)


def without_step(costs: StepCosts) -> StepCosts:
    """Return costs of which nothing says what the peak of the step is."""
    moments = {name: states for name, states in costs.at_moments.items() if name != MOMENTS[2]}
    return replace(costs, peaks={**costs.peaks, STEP: 0}, at_moments=moments, at_peak={})


def with_estimated_step(whole: StepCosts, few: StepCosts, chunks: UpdateChunks, layers: int) -> StepCosts | None:
    """Return costs with about the most that the step can have, if it has less than half of the device's highest peak.

    Beyond what there is when it begins a step takes memory for a chunk at a time. None if it may have more: then a
    simulation says what its peak is, which few blocks do not tell.
    """
    most, own = chunks.most(layers), chunks.most(chunks.depth)
    if most is None or not own:
        return None
    size = whole.at_step + -(-(few.peaks[STEP] - few.at_step) * max(most, own) // own)
    found = replace(without_step(whole), peaks={**whole.peaks, STEP: size})
    moment = highest_moment(found.peaks)
    if moment == MOMENTS[2] or 2 * size > found.peaks[f"{moment} {Tier.DEVICE.value}"]:
        return None
    return replace(found, at_peak=found.at_moments[moment])


def with_exact_step(whole: StepCosts, chunks: UpdateChunks, layers: int, at: Callable[[int], StepCosts]) -> StepCosts:
    """Return costs with the peak of the step that all blocks have; `at` simulates some of them."""
    found = [at(depth) for depth in chunks.depths(layers)]
    if len(found) > 1:
        first, second = chunks.depths(layers)
        blocks, between = layers - first, second - first
        found = [along(found[0], found[1], lambda one, other: one + (other - one) * blocks // between)]
    return with_step_of(whole, found[0])


def with_step_of(whole: StepCosts, other: StepCosts) -> StepCosts:
    """Return costs with the peak of the step that others have."""
    peaks = {**whole.peaks, STEP: other.peaks[STEP]}
    moments = {**whole.at_moments, MOMENTS[2]: other.at_moments[MOMENTS[2]]}
    return replace(whole, peaks=peaks, at_moments=moments, at_peak=moments[highest_moment(peaks)])
