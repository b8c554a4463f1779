"""One steady step as four rows over time: what the GPU computed, what came down, was updated, and went up.

Copies and kernels come from the profiler. Updates run on a thread of their own; they are timed around the kernel itself
and moved to the profiler's clock by a marker that both clocks saw.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import Workload
from benchmarks.gpu_worker import WARM_UP_STEPS, batches, synchronise
from benchmarks.offload_variants import EngineSteps, TorchSteps
from benchmarks.streams import Interval, merged

ROWS = ("compute", "down", "update", "up")
MARKER = "benchmark::step"
GAP = 20.0  # microseconds between two spans of a row that are drawn as one
COLOURS = {"compute": "#4c72b0", "down": "#dd8452", "update": "#55a868", "up": "#c44e52"}


@contextmanager
def timed_updates(spans: list[tuple[int, int]]) -> Iterator[None]:
    """Note when every update on the host began and ended, in nanoseconds of the performance counter."""
    from shardwell import kernels

    original: Callable[..., None] = kernels.update

    def update(*args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter_ns()
        original(*args, **kwargs)
        spans.append((begin, time.perf_counter_ns()))

    kernels.update = update
    try:
        yield
    finally:
        kernels.update = original


def profile_step(trainer: EngineSteps | TorchSteps, workload: Workload) -> dict[str, Any]:
    """Profile two steps and keep the second, with what the first left to do under it."""
    data = batches(workload)
    for step in range(WARM_UP_STEPS):
        trainer.step(*data[step % 2])
    synchronise(workload.device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if workload.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    updates: list[tuple[int, int]] = []
    with timed_updates(updates), torch.profiler.profile(activities=activities) as profiler:
        trainer.step(*data[WARM_UP_STEPS % 2])
        begin = time.perf_counter_ns()
        with torch.profiler.record_function(MARKER):
            trainer.step(*data[(WARM_UP_STEPS + 1) % 2])
            synchronise(workload.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    return rows_of(events, begin, updates)


def rows_of(events: list[dict[str, Any]], began: int, updates: list[tuple[int, int]]) -> dict[str, Any]:
    """Spans of each row in milliseconds from the start of the marked step, cut to its length."""
    marker = next(event for event in events if event["name"] == MARKER and event.get("cat") == "user_annotation")
    start, length = marker["ts"], marker["dur"]
    spans: dict[str, list[Interval]] = {row: [] for row in ROWS}
    spans["update"] = [((begin - began) / 1e3, (end - began) / 1e3) for begin, end in updates]
    for row, event in _on_rows(events, marker["tid"]):
        spans[row].append((event["ts"] - start, event["ts"] - start + event["dur"]))
    cut = {row: _cut(mine, length) for row, mine in spans.items()}
    busy = {row: sum(end - begin for begin, end in merged(mine)) / length for row, mine in cut.items()}
    drawn = {row: [(begin / 1e3, end / 1e3) for begin, end in merged(mine, GAP)] for row, mine in cut.items()}
    return {"step_ms": length / 1e3, "busy": busy, "spans_ms": drawn}


def _on_rows(events: list[dict[str, Any]], thread: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Copies by their way, and kernels of the busiest stream; without a GPU, the operations of the training loop."""
    busy: Counter[Any] = Counter()
    for event in events:
        if event.get("cat") == "kernel":
            busy[event["args"]["stream"]] += event["dur"]
    stream = max(busy, key=lambda one: busy[one], default=None)
    for event in events:
        kind = event.get("cat")
        is_loops = kind == "cpu_op" and event["tid"] == thread
        if kind == "gpu_memcpy" and "DtoH" in event["name"]:
            yield "down", event
        elif kind == "gpu_memcpy" and "HtoD" in event["name"]:
            yield "up", event
        elif is_loops if stream is None else kind == "kernel" and event["args"]["stream"] == stream:
            yield "compute", event


def _cut(spans: list[Interval], length: float) -> list[Interval]:
    return [(max(0.0, begin), min(length, end)) for begin, end in spans if end > 0 and begin < length]


def draw(profiles: dict[str, dict[str, Any]], path: Path) -> None:
    """One panel for each profile, all with the same scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(profiles), 1, figsize=(11, 2.2 * len(profiles)), sharex=True, squeeze=False)
    for panel, (name, found) in zip(panels[:, 0], profiles.items(), strict=True):
        for place, row in enumerate(reversed(ROWS)):
            bars = [(begin, end - begin) for begin, end in found["spans_ms"][row]]
            panel.broken_barh(bars, (place - 0.4, 0.8), facecolors=COLOURS[row])
        labels = [f"{row} {found['busy'][row]:.0%}" for row in reversed(ROWS)]
        panel.set_yticks(range(len(ROWS)), labels)
        panel.set_ylim(-0.6, len(ROWS) - 0.4)
        panel.set_title(f"{name}: {found['step_ms']:.0f} ms", loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("ms from the start of the step")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
