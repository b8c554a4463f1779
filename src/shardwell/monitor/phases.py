"""`wall_clock_breakdown`: how long forward, backward, step and everything else take.

Each mark ends an interval. Marks are moments of the device's stream, read when a line is due: nothing waits in between.
"""

from __future__ import annotations

from shardwell.memory import Device
from shardwell.memory.timing import Moment
from shardwell.monitor.numbers import milliseconds

PHASES = ("forward", "backward", "forward and backward", "step", "other")  # the third: of a pipeline, whose passes mix


class Phases:
    """The intervals since the last line."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._marks: list[tuple[str, Moment]] = [("", device.moment())]

    def mark(self, phase: str) -> None:
        """End an interval, which belongs to this phase."""
        self._marks.append((phase, self._device.moment()))

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase, and begin anew. This waits for the device."""
        seconds: dict[str, float] = {}
        for (_, before), (phase, mark) in zip(self._marks, self._marks[1:], strict=False):
            seconds[phase] = seconds.get(phase, 0.0) + mark.since(before)
        self._marks = self._marks[-1:]
        return seconds


def phases_line(seconds: dict[str, float], steps: int) -> str:
    """Return the mean times of a step."""
    total = sum(seconds.values()) or 1.0
    parts = (
        f"{name} {milliseconds(seconds[name] / steps)} ({seconds[name] / total:.0%})"
        for name in PHASES
        if name in seconds
    )
    return f"  time of a step: {', '.join(parts)}"
