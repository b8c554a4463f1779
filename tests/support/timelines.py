"""Timelines without engines, for tests of their pictures."""

from __future__ import annotations

from shardwell.monitor.timeline import Span, Timeline


def busy_timeline(blocks: int = 12, steps: int = 2) -> Timeline:
    """A timeline with all rows: a prefetch that is late, updates on the host, and transfers from disk."""
    spans: list[Span] = []
    now, size = 0.0, 25_165_824
    for _ in range(steps):
        for phase, order in (("forward", range(blocks)), ("backward", reversed(range(blocks)))):
            for number in order:
                work = 0.004 if phase == "forward" else 0.008
                late = 0.003 if number % 3 == 0 else 0.0
                spans.append(Span("all-gather", f"all-gather blocks.{number}", now - 0.003, now + late, size))
                spans.append(Span("copy up", "copy up", max(0.0, now - 0.004), now - 0.001, size // 2))
                if late:
                    spans.append(Span("wait", f"all-gather of blocks.{number}", now, now + late))
                spans.append(Span("compute", f"{phase} blocks.{number}", now + late, now + late + work))
                now += late + work
                if phase == "backward":
                    spans.append(Span("reduce-scatter", f"reduce-scatter blocks.{number}", now, now + 0.005, size))
                    spans.append(Span("copy down", "copy down", now + 0.005, now + 0.007, size // 2))
                    spans.append(Span("host update", f"update blocks.{number}", now + 0.007, now + 0.015))
                    spans.append(Span("disk", "write", now + 0.015, now + 0.019, size))
        spans.append(Span("compute", "step (root)", now, now + 0.002))
        spans.append(Span("compute", "other", now + 0.002, now + 0.012))
        now += 0.012
    inside = [one for one in spans if one.begin >= 0 and one.end <= now]
    notes = ("On CPU ranks a collective is drawn from its start to the end of the wait for it.",)
    return Timeline(tuple(inside), now, steps, 0, f"{steps} steps of rank 0", notes)
