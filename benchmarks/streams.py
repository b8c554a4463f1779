"""From a profiler trace to a short account of the streams: who worked on each, how long, and what ran side by side.

Pure functions over the events of a Chrome trace; nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
TOP_KERNELS = 8

Interval = tuple[float, float]


def merged(intervals: list[Interval], gap: float = 0.0) -> list[Interval]:
    """The union of intervals as disjoint intervals in order; those no more than ``gap`` apart become one."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1] + gap:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def overlap(first: list[Interval], second: list[Interval]) -> float:
    """How long both of two unions were busy at once."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def _annotated_launches(events: list[dict[str, Any]], prefix: str) -> dict[int, str]:
    """For each launch (by correlation) inside a range ``prefix``KIND NAME of the same thread: its KIND."""
    ranges: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith(prefix):
            kind = event["name"].removeprefix(prefix).split(" ")[0]
            ranges[event["tid"]].append((event["ts"], event["ts"] + event["dur"], kind))
    launches: dict[int, str] = {}
    for event in events:
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {}):
            for begin, end, kind in ranges.get(event["tid"], ()):
                if begin <= event["ts"] <= end:
                    launches[event["args"]["correlation"]] = kind
    return launches


def summarise_trace(trace: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Per stream: busy milliseconds, top kernels, time overlapped with the busiest stream, and which annotated actions
    launched its work. The count of annotated ranges is there on a CPU trace as well."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launches = _annotated_launches(events, prefix)
    busy: dict[str, list[Interval]] = defaultdict(list)
    kernels: dict[str, Counter[str]] = defaultdict(Counter)
    actions: dict[str, Counter[str]] = defaultdict(Counter)
    for event in events:
        if event.get("cat") in ON_DEVICE:
            stream = str(event["args"]["stream"])
            busy[stream].append((event["ts"], event["ts"] + event["dur"]))
            kernels[stream][event["name"]] += event["dur"]
            actions[stream][launches.get(event["args"].get("correlation", -1), "other")] += event["dur"]
    unions = {stream: merged(intervals) for stream, intervals in busy.items()}
    totals = {stream: sum(end - begin for begin, end in union) for stream, union in unions.items()}
    main = max(totals, key=lambda stream: totals[stream], default=None)
    ranges = Counter(
        event["name"].removeprefix(prefix).split(" ")[0]
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(prefix)
    )
    streams = {
        stream: {
            "busy_ms": totals[stream] / 1000,
            "overlapped_with_busiest_ms": 0.0 if stream == main else overlap(unions[stream], unions[main or ""]) / 1000,
            "launched_by_ms": {kind: duration / 1000 for kind, duration in actions[stream].most_common()},
            "top_kernels_ms": {
                name[:120]: duration / 1000 for name, duration in kernels[stream].most_common(TOP_KERNELS)
            },
        }
        for stream in sorted(totals, key=lambda stream: -totals[stream])
    }
    return {"busiest_stream": main, "ranges": dict(ranges), "streams": streams}
