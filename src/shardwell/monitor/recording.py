"""Records a timeline: `engine.record(timing=True)`, and `shardwell run --profile`.

Marks of the schedule say which unit computes. Collectives are timed as `comms_log.py` does it, with the waits for them.
Host updates and transfers from and to disk report themselves (`shardwell.spans`). On CUDA, copies between host and
device come from torch's profiler.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwell import spans as reports
from shardwell.memory import Device
from shardwell.memory.timing import Moment
from shardwell.monitor.numbers import plural
from shardwell.monitor.timeline import ROOT, Span, Timeline
from shardwell.parallel.traffic import TrafficKind, TrafficStats
from shardwell.parallel.transport import ObservedWork, Work
from shardwell.runtime.trace import Trace, TraceAction

_ROWS = {
    TrafficKind.ALL_GATHER: "all-gather",
    TrafficKind.PUBLISH: "all-gather",
    TrafficKind.REDUCE_SCATTER: "reduce-scatter",
}
_MARKER = "shardwell::timeline"


@dataclass
class _Collective:
    """An all-gather or reduce-scatter while it is recorded."""

    row: str
    unit: str
    num_bytes: int
    issued: Moment
    ready: Moment
    ended: Moment | None = None
    waits: Moment | None = None  # since when the loop's stream waits for it
    waited: Moment | None = None


class TimedTrace(Trace):
    """A trace whose events have times; `timeline` is there when the recording has ended."""

    def __init__(self, unit_names: list[str], device: Device, traffic: TrafficStats) -> None:
        super().__init__(unit_names)
        self._device, self._traffic = device, traffic
        self._before = traffic.observer
        self._marks: list[tuple[TraceAction | None, int, Moment]] = []  # None: the model's forward has ended
        self._collectives: list[_Collective] = []
        self._spans: list[Span] = []
        self._transfers: list[tuple[float, bool, int, Any]] = []
        self._zero, self._host_zero = device.moment(), time.perf_counter()
        self.is_inside = False
        self.timeline: Timeline | None = None

    # ---------------------------------------------------------------------------------------- what reports to a trace

    def add(self, action: TraceAction, unit: int, operation: str = "") -> None:
        """Append an event with its time."""
        super().add(action, unit, operation)
        self._marks.append((action, unit, self._device.moment()))

    def forward_ended(self, *_: Any) -> None:
        """Note that the model's forward has ended: what follows is the loss and the backward."""
        self._marks.append((None, 0, self._device.moment()))

    def follow(self, token: str | None, kind: TrafficKind, start: Callable[[], Work]) -> Work:
        """Start a collective, and time it and the wait for it."""
        row = _ROWS.get(kind)
        stream = self._device.reduce_stream if row == "reduce-scatter" else self._device.all_gather_stream
        before = sum(self._traffic.received.values())
        issued, ready = self._device.moment(stream), self._device.moment()
        self.is_inside = True
        try:
            work = start()
        finally:
            self.is_inside = False
        if row is None:
            return work
        unit = (token or "").partition(" ")[2].partition("#")[0] or ROOT
        entry = _Collective(row, unit, sum(self._traffic.received.values()) - before, issued, ready)
        self._collectives.append(entry)
        if self._device.has_streams:
            entry.ended = self._device.moment(stream)

        def waits() -> None:
            entry.waits = self._device.moment()

        def waited() -> None:
            entry.waited = self._device.moment()

        return ObservedWork(work, waits, waited)

    def span(self, row: str, name: str, begin: float, end: float, num_bytes: int = 0) -> None:
        """Take a span of the host, on any thread."""
        self._spans.append(Span(row, name, begin - self._host_zero, end - self._host_zero, num_bytes))

    def transfer(self, is_write: bool, num_bytes: int, transfer: object) -> None:
        """Take a transfer from or to disk."""
        self._transfers.append((time.perf_counter(), is_write, num_bytes, transfer))

    # ---------------------------------------------------------------------------------------------------- the timeline

    def _repr_html_(self) -> str:
        """Return the picture of the timeline for notebooks; while the recording lasts, the tokens so far."""
        return super()._repr_html_() if self.timeline is None else self.timeline._repr_html_()

    def finish(self, rank: int, copies: list[Span]) -> Timeline:
        """Return the timeline. This waits for the device."""
        seconds = self._device.moment().since(self._zero)
        waits = _one_at_a_time([*self._waits(), *(span for span in self._spans if span.row == "wait")])
        found = [
            *self._computed(seconds, waits),
            *waits,
            *(self._moved(one) for one in self._collectives if self._end(one) is not None),
            *(span for span in self._spans if span.row != "wait"),
            *self._on_disk(),
            *copies,
        ]
        inside = [
            Span(span.row, span.name, max(span.begin, 0.0), min(span.end, seconds), span.num_bytes)
            for span in found
            if span.end > 0 and span.begin < seconds
        ]
        steps = max(1, self._num_steps())
        notes = (
            ()
            if self._device.has_streams
            else ("On CPU ranks a collective is drawn from its start to the end of the wait for it.",)
        )
        self.timeline = Timeline(tuple(inside), seconds, steps, rank, f"{plural(steps, 'step')} of rank {rank}", notes)
        return self.timeline

    def _num_steps(self) -> int:
        stepped = [unit for action, unit, _ in self._marks if action is TraceAction.STEP]
        return stepped.count(stepped[0]) if stepped else 1

    def _name(self, unit: int) -> str:
        return self.unit_names[unit] or ROOT if unit < len(self.unit_names) else ROOT

    def _computed(self, seconds: float, waits: list[Span]) -> Iterator[Span]:
        """Yield what the loop's stream does between marks, without its waits."""
        label, begin = "other", 0.0
        for action, unit, moment in self._marks:
            now, name = moment.since(self._zero), self._name(unit)
            after = label
            match action:
                case TraceAction.FORWARD:
                    after = f"forward {name}"
                case TraceAction.BACKWARD:
                    after = f"backward {name}"
                case None:
                    after = "backward and loss"
                case TraceAction.RESHARD if not label.startswith("other"):
                    after = f"{label.split(' ')[0]} {ROOT}"
                case TraceAction.REDUCE_SCATTER if label.startswith("backward and"):
                    label = f"backward {name}"
                    after = "backward and loss"
                case TraceAction.STEP:
                    label, after = f"step {name}", "other"
            yield from _without(Span("compute", label, begin, now), waits)
            label, begin = after, now
        yield from _without(Span("compute", label, begin, seconds), waits)

    def _waits(self) -> list[Span]:
        found = []
        for one in self._collectives:
            if one.waits is not None and one.waited is not None:
                begin, end = one.waits.since(self._zero), one.waited.since(self._zero)
                if end > begin:
                    found.append(Span("wait", f"{one.row} of {one.unit}", begin, end))
        return found

    def _end(self, one: _Collective) -> Moment | None:
        return one.ended or one.waited

    def _moved(self, one: _Collective) -> Span:
        end = self._end(one)
        assert end is not None
        # The loop's stream may reach its mark after another stream has moved everything: a prefetch waits for nothing.
        ended = end.since(self._zero)
        begin = min(max(one.issued.since(self._zero), one.ready.since(self._zero)), ended)
        return Span(one.row, f"{one.row} {one.unit}", begin, ended, one.num_bytes)

    def _on_disk(self) -> Iterator[Span]:
        for begin, is_write, num_bytes, transfer in self._transfers:
            begin -= self._host_zero
            yield Span("disk", "write" if is_write else "read", begin, begin + float(transfer.seconds), num_bytes)


def _one_at_a_time(waits: list[Span]) -> list[Span]:
    """Return waits without what an earlier one covers: the host and the loop's stream may wait at the same time."""
    found: list[Span] = []
    upto = 0.0
    for wait in sorted(waits, key=lambda one: (one.begin, one.end)):
        if wait.end > max(wait.begin, upto):
            found.append(replace(wait, begin=max(wait.begin, upto)))
            upto = wait.end
    return found


def _without(span: Span, waits: list[Span]) -> Iterator[Span]:
    """Yield the parts of a span in which nothing was waited for."""
    begin = span.begin
    for wait in waits:
        if wait.end <= begin or wait.begin >= span.end:
            continue
        if wait.begin > begin:
            yield Span(span.row, span.name, begin, wait.begin)
        begin = max(begin, wait.end)
    if begin < span.end:
        yield Span(span.row, span.name, begin, span.end)


@contextlib.contextmanager
def timed_recording(
    scheduler: Any, device: Device, traffic: TrafficStats, model: Any, rank: int
) -> Iterator[TimedTrace]:
    """Record what an engine does inside, with times. At its ends the host waits for the device."""
    with _copies(device) as copies:
        trace = TimedTrace([unit.name for unit in scheduler.units], device, traffic)
        hook = model.register_forward_hook(trace.forward_ended)
        before, traffic.observer = traffic.observer, trace
        listener, reports.listener = reports.listener, trace
        try:
            with scheduler.recording(trace):
                yield trace
        finally:
            traffic.observer, reports.listener = before, listener
            hook.remove()
    trace.finish(rank, copies)


@contextlib.contextmanager
def _copies(device: Device) -> Iterator[list[Span]]:
    """Yield a list that has the copies between host and device when the block has ended; it stays empty on a CPU."""
    found: list[Span] = []
    if not device.has_streams:
        yield found
        return
    from torch.profiler import ProfilerActivity, profile, record_function

    device.now().synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(_MARKER):
            device.now().synchronize()
        yield found
        device.now().synchronize()
    events = list(profiler.events() or ())
    zero = min((event.time_range.start for event in events if event.name == _MARKER), default=0.0)
    for event in events:
        row = "copy up" if "HtoD" in event.name else "copy down" if "DtoH" in event.name else None
        if row is not None and event.name.startswith("Memcpy"):
            begin, end = ((at - zero) / 1e6 for at in (event.time_range.start, event.time_range.end))
            found.append(Span(row, row, begin, end))
