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


LANES = ("compute", "all-gather", "reduction", "copy")


def lane_of(event: dict[str, Any]) -> str:
    """The lane of an event on the device: a collective by its kernel's name, a copy, or compute."""
    name = str(event["name"])
    if "nccl" in name.lower():
        return "all-gather" if "AllGather" in name or "Broadcast" in name else "reduction"
    return "copy" if event["cat"] != "kernel" else "compute"


def lanes(trace: dict[str, Any], gap: float = 20.0) -> dict[str, Any]:
    """What ran in each lane, as disjoint intervals in milliseconds since the first, and for how much the link was idle.

    Intervals that are no more than ``gap`` microseconds apart are drawn as one; the shares count the gaps.
    """
    busy: dict[str, list[Interval]] = {lane: [] for lane in LANES}
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE:
            busy[lane_of(event)].append((event["ts"], event["ts"] + event["dur"]))
    every = [interval for intervals in busy.values() for interval in intervals]
    if not every:
        return {"milliseconds": 0.0, "lanes": {lane: [] for lane in LANES}, "busy": {}, "link_idle": 1.0}
    begin, end = min(first for first, _ in every), max(last for _, last in every)
    link = merged(busy["all-gather"] + busy["reduction"])
    shares = {lane: sum(b - a for a, b in merged(intervals)) / (end - begin) for lane, intervals in busy.items()}
    shares["both directions"] = overlap(merged(busy["all-gather"]), merged(busy["reduction"])) / (end - begin)
    drawn = {
        lane: [[round((a - begin) / 1e3, 3), round((b - begin) / 1e3, 3)] for a, b in merged(intervals, gap)]
        for lane, intervals in busy.items()
    }
    idle = 1.0 - sum(b - a for a, b in link) / (end - begin)
    return {"milliseconds": (end - begin) / 1e3, "lanes": drawn, "busy": shares, "link_idle": idle}
