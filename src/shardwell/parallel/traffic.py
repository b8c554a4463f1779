"""Statistics of the bytes that this rank receives, by purpose and by hop.

Payload is what the algorithm must move to this rank: an all-gather of N equal shards brings N-1 of them. Control
traffic (norms, agreements) and set-up (the first broadcast of the weights) are counted separately.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from shardwell.memory.statistics import PrintsAsTable, human

if TYPE_CHECKING:
    from rich.table import Table

    from shardwell.parallel.transport import Work


class TrafficKind(enum.Enum):
    """The purpose of received bytes."""

    ALL_GATHER = "gather"  # parameters that are unsharded
    REDUCE_SCATTER = "reduce"  # gradients averaged into shards
    PUBLISH = "publish"  # updated parameters, or averaged gradients, sent to all ranks
    OPTIMIZER = "step"  # matrices that an optimizer needs unsharded
    TENSOR = "tensor"  # activations and their gradients, over the tensor axis
    EXPERT = "expert"  # tokens that experts of other ranks compute, and their gradients
    SEQUENCE = "sequence"  # activations and their gradients, over the sequence axis
    PIPE = "pipe"  # activations and their gradients, between pipeline stages
    CONTROL = "control"
    SETUP = "setup"

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere


_DATA = (TrafficKind.ALL_GATHER, TrafficKind.REDUCE_SCATTER, TrafficKind.PUBLISH, TrafficKind.OPTIMIZER)
_MODEL = (TrafficKind.TENSOR, TrafficKind.EXPERT, TrafficKind.SEQUENCE, TrafficKind.PIPE)
PAYLOAD = (*_DATA, *_MODEL)
INSIDE, BETWEEN = "inside", "between"  # inside a node; between nodes


@dataclass(frozen=True)
class TrafficReport(PrintsAsTable):
    """Bytes received by this rank, by (kind, hop), and the number of collectives by kind."""

    received: dict[tuple[TrafficKind, str], int]
    calls: dict[TrafficKind, int]

    def total(self, *kinds: TrafficKind) -> int:
        """Return the bytes of these kinds; of all payload kinds if none is named."""
        return sum(size for (kind, _), size in self.received.items() if kind in (kinds or PAYLOAD))

    def by_axis(self) -> dict[str, int]:
        """Return the bytes of payload by axis: "data" for parameters and gradients; tensor, expert, sequence, pipe."""
        return {"data": self.total(*_DATA), **{kind.value: self.total(kind) for kind in _MODEL}}

    def table(self) -> Table:
        """Return a rich table of calls and bytes by kind."""
        from rich.table import Table

        table = Table(title="received by this rank in one step")
        for column in ("collective", "calls", "inside the node", "between nodes"):
            table.add_column(column, justify="left" if column == "collective" else "right")
        for kind in TrafficKind:
            if self.calls.get(kind):
                inside, between = (self.received.get((kind, hop), 0) for hop in (INSIDE, BETWEEN))
                table.add_row(kind.value, str(self.calls[kind]), human(inside), human(between))
        return table


class CollectiveObserver(Protocol):
    """An object that times the all-gathers and reduce-scatters of an engine."""

    is_inside: bool  # `follow` calls `start`, and the collective must not ask again

    def follow(self, token: str | None, kind: TrafficKind, start: Callable[[], Work]) -> Work:
        """Start a collective, and return its work."""


@dataclass
class TrafficStats:
    """Counters of one step at a time, which `Collectives` increments, and the report of the step before."""

    received: defaultdict[tuple[TrafficKind, str], int] = field(default_factory=lambda: defaultdict(int))
    calls: defaultdict[TrafficKind, int] = field(default_factory=lambda: defaultdict(int))
    last: TrafficReport = field(default_factory=lambda: TrafficReport({}, {}))
    observer: CollectiveObserver | None = None

    def current(self) -> TrafficReport:
        """Return a report of the current step."""
        return TrafficReport(dict(self.received), dict(self.calls))
