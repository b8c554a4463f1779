"""The largest number that fits, of what memory grows with: micro-batches, or lengths of sequences.

A peak is the highest of several moments, and each moment's bytes are a constant and an amount for each sequence of the
batch (and, with fused attention, for each token). So a peak is a convex function of the number. The line through two
simulations is never above it further out, and a line between two of its points is never below it in between: a first
line gives a number that may be too large, and the line to that point one that fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwell.memory import Tier
from shardwell.plan.report import PlanReport
from shardwell.plan.simulation import MOMENTS

MOST = 1 << 20
_TRIES = 8


@dataclass(frozen=True)
class PeakLines:
    """The device's peak at each moment at two numbers."""

    numbers: tuple[int, int]
    reports: tuple[PlanReport, PlanReport]

    def largest(self, most: int = MOST) -> int:
        """Return the largest number at which no line is above the room of the device; 0 if there is none."""
        low, high = self.numbers
        found = most
        for moment in MOMENTS:
            one, other = (report.costs.peaks.get(f"{moment} {Tier.DEVICE.value}", 0) for report in self.reports)
            room = self.reports[0].device_room - one
            if room < 0:
                return 0
            if other > one:
                found = min(found, low + int(room * (high - low) // (other - one)))
        return found


def largest_that_fits(
    plan: Callable[[int], PlanReport], first: int, second: int, most: int = MOST
) -> tuple[int, PlanReport] | None:
    """Return the largest number up to `most` that fits, and its plan; None if `first` does not."""
    one = plan(first)
    if not one.fits:
        return None
    if first >= most:
        return first, one
    return confirmed(plan, PeakLines((first, second), (one, plan(second))), most)


def confirmed(plan: Callable[[int], PlanReport], lines: PeakLines, most: int) -> tuple[int, PlanReport]:
    """Return the largest number that is found to fit by simulations; the first number of the lines must fit."""
    low, one = lines.numbers[0], lines.reports[0]
    best = low, one
    for _ in range(_TRIES):
        number = max(best[0], lines.largest(most))
        if number == best[0]:
            break
        report = plan(number)
        if report.fits:
            best = number, report
        else:
            most = number - 1
        lines = PeakLines((low, number), (one, report))  # what a line between two points allows fits
    return best
