"""`comms_logger`: calls, bytes, time and bandwidth of all-gathers and reduce-scatters.

On CUDA a collective is timed on its own stream, from the moment when its input is ready. Elsewhere it is timed by the
host from its start to the end of the wait for it, which it may have overlapped with other work.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from shardwell.config.monitoring import CommsLoggerConfig
from shardwell.memory import Device
from shardwell.memory.statistics import human, render
from shardwell.memory.timing import Moment
from shardwell.monitor.numbers import milliseconds, short
from shardwell.parallel.traffic import TrafficKind, TrafficStats
from shardwell.parallel.transport import ObservedWork, Work

if TYPE_CHECKING:
    from rich.table import Table

NAMES = {
    TrafficKind.ALL_GATHER: "all_gather",
    TrafficKind.REDUCE_SCATTER: "reduce_scatter",
    TrafficKind.PUBLISH: "publish",
}


LIVING: weakref.WeakSet[CommsLog] = weakref.WeakSet()  # of this process


@dataclass
class LoggedCollective:
    """One collective: its moments are read when a line is due."""

    name: str
    token: str
    num_bytes: int
    issued: Moment  # on its own stream, where earlier collectives may be in its way
    ready: Moment  # on the stream that makes its input
    ended: Moment | None = None

    def seconds(self) -> float:
        """Return how long it took. This waits for the device."""
        assert self.ended is not None
        return min(self.ended.since(self.issued), self.ended.since(self.ready))


class CommsLog:
    """The collectives since the last line, and the sums of the whole run."""

    def __init__(self, config: CommsLoggerConfig, device: Device, traffic: TrafficStats) -> None:
        self._config, self._device, self._traffic = config, device, traffic
        self._open: list[LoggedCollective] = []
        self.is_inside = False
        LIVING.add(self)
        self.sums: dict[str, tuple[int, int, float]] = {}  # name -> calls, bytes, seconds

    def follow(self, token: str | None, kind: TrafficKind, start: Callable[[], Work]) -> Work:
        """Start a collective, and time it if it is one of those that are logged."""
        name = NAMES.get(kind)
        if name is None or not (self._config.prof_all or name in self._config.prof_ops):
            return self._start(start)
        is_reduction = kind is TrafficKind.REDUCE_SCATTER
        stream = self._device.reduce_stream if is_reduction else self._device.all_gather_stream
        before = sum(self._traffic.received.values())
        issued, ready = self._device.moment(stream), self._device.moment()
        work = self._start(start)
        received = sum(self._traffic.received.values()) - before
        entry = LoggedCollective(name, token or "", received, issued, ready)
        self._open.append(entry)
        if self._device.has_streams:
            entry.ended = self._device.moment(stream)
            return work
        return ObservedWork(work, _nothing, partial(self._end, entry))

    def _start(self, start: Callable[[], Work]) -> Work:
        self.is_inside = True
        try:
            return start()
        finally:
            self.is_inside = False

    def _end(self, entry: LoggedCollective) -> None:
        entry.ended = self._device.moment()

    def take(self) -> list[str]:
        """Return the lines that are due: one for each collective if `verbose`, and a table. This waits."""
        lines = []
        done = [entry for entry in self._open if entry.ended is not None]
        self._open = [entry for entry in self._open if entry.ended is None]
        for entry in done:
            seconds = entry.seconds()
            calls, size, total = self.sums.get(entry.name, (0, 0, 0.0))
            self.sums[entry.name] = calls + 1, size + entry.num_bytes, total + seconds
            if self._config.verbose:
                where = f" | {entry.token}" if self._config.debug else ""
                rate = short(entry.num_bytes / seconds / 1e9) if seconds else "-"
                lines.append(
                    f"  {entry.name} | {human(entry.num_bytes)} | {milliseconds(seconds)} | {rate} GB/s{where}"
                )
        return [*lines, self.summary()] if self.sums else lines

    def summary(self) -> str:
        """Return the table of the run so far."""
        return render(self._table())

    def _table(self) -> Table:
        from rich.table import Table

        table = Table(title="collectives so far on this rank")
        for column in ("collective", "calls", "received", "mean time", "total time", "GB/s"):
            table.add_column(column, justify="left" if column == "collective" else "right")
        for name, (calls, size, seconds) in sorted(self.sums.items()):
            rate = short(size / seconds / 1e9) if seconds else "-"
            table.add_row(name, str(calls), human(size), milliseconds(seconds / calls), f"{short(seconds)} s", rate)
        return table


def _nothing() -> None:
    """Take the news that a wait begins, which is of no use here."""
