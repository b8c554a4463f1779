"""A trace of the step: every action is a short token that is recorded and printed, but never replayed."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function


class TraceAction(enum.Enum):
    """An action on a unit. The value is its letter in a token."""

    DISK_READ = "D"  # prefetched from NVMe
    HOST_TO_DEVICE = "U"  # copied to the device ahead of the all-gather
    ALL_GATHER = "G"  # unsharded by an all-gather
    FORWARD = "F"
    BACKWARD = "B"
    RESHARD = "L"  # resharded
    REDUCE_SCATTER = "R"  # gradients averaged over the ranks
    STEP = "S"
    PUBLISH = "P"
    OPERATION = "O"  # an operation of a pipeline begins; it prints as itself: '2F0'


@dataclass(frozen=True)
class TraceEvent:
    """One action on one unit; it prints as 'G3' and parses back. The unit of a pipeline's operation is its stage."""

    action: TraceAction
    unit: int
    operation: str = ""

    def __str__(self) -> str:
        return self.operation or f"{self.action.value}{self.unit}"

    @classmethod
    def parse(cls, token: str) -> TraceEvent:
        """Return the event of a token such as 'G3'."""
        if (operation := re.fullmatch(r"(\d+)[FBIW]\d+", token)) is not None:
            return cls(TraceAction.OPERATION, int(operation[1]), token)
        found = re.fullmatch(r"([A-Z])(\d+)", token)
        if found is None:
            raise ValueError(f"'{token}' is not an event; events look like 'G3'")
        return cls(TraceAction(found[1]), int(found[2]))


@dataclass
class Trace:
    """The recorded events, in order."""

    unit_names: list[str] = field(default_factory=list)
    events: list[TraceEvent] = field(default_factory=list)

    def add(self, action: TraceAction, unit: int, operation: str = "") -> None:
        """Append an event."""
        self.events.append(TraceEvent(action, unit, operation))

    def __iter__(self) -> Iterator[TraceEvent]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def count(self, action: TraceAction, unit: int | None = None) -> int:
        """Return how often an action occurs, on all units or on one."""
        return sum(event.action is action and unit in (None, event.unit) for event in self.events)

    def __str__(self) -> str:
        """Return the tokens, and below them a legend of unit numbers and names."""
        legend = "  ".join(f"{index}={name or '(root)'}" for index, name in enumerate(self.unit_names))
        return " ".join(map(str, self.events)) + (f"\n{legend}" if legend else "")

    def _repr_html_(self) -> str:
        """Return the same for notebooks; long lines are broken."""
        return f'<pre style="white-space:pre-wrap">{escape(str(self))}</pre>'


is_profiling: Callable[[], bool] = _profiler_enabled
NOT_PROFILED = contextlib.nullcontext()


def profiled(action: str, unit: str) -> contextlib.AbstractContextManager[object]:
    """Return a profiler range. It has a cost without a profiler too, so callers ask `is_profiling` first."""
    return record_function(f"shardwell::{action} {unit}")
