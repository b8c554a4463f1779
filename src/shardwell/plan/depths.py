"""What all blocks of a model take, from simulations of few of them at two depths.

All bytes are a constant and an amount for each block, but for peaks: each instant of a step is, and the peak is the
highest of them, with all blocks perhaps another one than with few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwell.memory import Tier
from shardwell.plan.instants import Lines
from shardwell.plan.simulation import MOMENTS, ROUNDED, StepCosts, along, are_alike, highest_moment
from shardwell.plan.update_chunks import without_step

_Key = tuple[str, int, Tier]  # a moment, the number of the micro-step and a tier


@dataclass(frozen=True)
class TwoDepths:
    """The costs at two depths; another depth is so many times the second less the first away from the first."""

    one: StepCosts
    other: StepCosts
    lines: dict[_Key, Lines | None]  # None where the instants of the two depths are not the same

    @classmethod
    def of(cls, one: StepCosts, other: StepCosts) -> TwoDepths:
        """Pair the instants of two simulations."""
        keys = {**one.instants, **other.instants}
        both = {key: (one.instants.get(key), other.instants.get(key)) for key in keys}
        return cls(one, other, {key: Lines.of(a, b) if a and b else None for key, (a, b) in both.items()})

    def at(self, times: int) -> StepCosts:
        """Return the costs at another depth."""
        whole = along(self.one, self.other, lambda first, second: first + (second - first) * times)
        peaks, moments = dict(whole.peaks), dict(whole.at_moments)
        for (moment, tier), (_, _, size, states) in self._highest(times).items():
            peaks[f"{moment} {tier.value}"] = size
            if states:
                moments[moment] = states
        return replace(whole, peaks=peaks, at_moments=moments, at_peak=moments[highest_moment(peaks)])

    def is_confirmed(self, third: StepCosts, times: int, times_all: int, *, with_step: bool) -> bool:
        """Return whether a third simulation is what the two predict.

        It must have the same peaks, and what is highest with all blocks must go on as the two say; but for the device's
        peak in the step if that is found otherwise.
        """
        pair = self.at(times), third
        if not are_alike(*(pair if with_step else map(without_step, pair))):
            return False
        for (moment, tier), (key, place, _, _) in self._highest(times_all).items():
            lines = self.lines[key]
            if lines is None or (tier is Tier.DEVICE and moment == MOMENTS[2] and not with_step):
                continue
            if key not in third.instants or lines.differs(third.instants[key], place, times) > ROUNDED:
                return False
        return True

    def _highest(self, times: int) -> dict[tuple[str, Tier], tuple[_Key, int, int, dict[str, int]]]:
        """Return for each moment and tier which instant is the highest, its bytes and its parts, if all are known."""
        found: dict[tuple[str, Tier], tuple[_Key, int, int, dict[str, int]]] = {}
        unknown = {(key[0], key[2]) for key, lines in self.lines.items() if lines is None}
        for key, lines in self.lines.items():
            if lines is not None and (key[0], key[2]) not in unknown:
                place, size, parts = lines.highest(times)
                known = found.get((key[0], key[2]))
                if known is None or size > known[2]:
                    found[key[0], key[2]] = key, place, size, parts
        return found
