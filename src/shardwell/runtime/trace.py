"""The step as data: every action is a short token, recorded and printed, never replayed."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function


class TraceAction(enum.Enum):
    """What can happen to a unit. The value is its letter in a token."""

    READ = "D"  # from the drive, ahead
    LIFT = "U"  # up to the device, ahead
    GATHER = "G"
    FORWARD = "F"
    BACKWARD = "B"
    RELEASE = "L"  # let go
    REDUCE = "R"
    STEP = "S"
    PUBLISH = "P"


@dataclass(frozen=True)
class TraceEvent:
    """One action on one unit; prints as 'G3' and parses back."""

    action: TraceAction
    unit: int

    def __str__(self) -> str:
        return f"{self.action.value}{self.unit}"

    @classmethod
    def parse(cls, token: str) -> TraceEvent:
        found = re.fullmatch(r"([A-Z])(\d+)", token)
        if found is None:
            raise ValueError(f"'{token}' is not an event; events look like 'G3'")
        return cls(TraceAction(found[1]), int(found[2]))


@dataclass
class Trace:
    """What happened, in order."""

    unit_names: list[str] = field(default_factory=list)
    events: list[TraceEvent] = field(default_factory=list)

    def __iter__(self) -> Iterator[TraceEvent]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def count(self, action: TraceAction, unit: int | None = None) -> int:
        return sum(event.action is action and unit in (None, event.unit) for event in self.events)

    def __str__(self) -> str:
        """The tokens, and below them which number is which unit."""
        legend = "  ".join(f"{index}={name or '(root)'}" for index, name in enumerate(self.unit_names))
        return " ".join(map(str, self.events)) + (f"\n{legend}" if legend else "")


_nothing = contextlib.nullcontext()


def profiled(action: str, unit: str) -> contextlib.AbstractContextManager[object]:
    """A range of its own in the profiler that runs, if one does: a range costs also where nobody looks."""
    return record_function(f"shardwell::{action} {unit}") if _profiler_enabled() else _nothing
