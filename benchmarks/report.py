"""From figures to tables and verdicts: what the peers benchmark prints, and the targets that it judges.

Pure functions over the summary (one flat dictionary of figures per contender); nothing here measures anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

MIB = 2**20


@dataclass(frozen=True)
class Target:
    """``ours`` must stay within ``factor`` times every peer's ``figure`` (below it, where ``strict``)."""

    label: str
    figure: str
    ours: str
    peers: tuple[str, ...]
    factor: float
    strict: bool = False


TARGETS = (
    Target("CPU-s, stage 3 / FSDP2", "cpu_seconds", "shardwell3", ("fsdp2",), 0.85),
    Target("CPU-s, stage 3 / DeepSpeed 3", "cpu_seconds", "shardwell3", ("deepspeed3",), 0.70),
    Target("CPU-s, stage 1 / DDP", "cpu_seconds", "shardwell1", ("ddp",), 1.05),
    Target("CPU-s, stage 2 / DDP", "cpu_seconds", "shardwell2", ("ddp",), 1.05),
    Target("peak bytes, stage 3 / FSDP2", "peak_bytes", "shardwell3", ("fsdp2",), 1.0, strict=True),
    Target(
        "peak bytes, stage 3 / best peer",
        "peak_bytes",
        "shardwell3",
        ("fsdp2", "fsdp2-default", "deepspeed3", "deepspeed3-tuned"),
        1.0,
        strict=True,
    ),
    Target("peak bytes, stage 2 / best peer", "peak_bytes", "shardwell2", ("deepspeed2",), 1.0, strict=True),
    Target("peak bytes, stage 1 / best peer", "peak_bytes", "shardwell1", ("ddp+zero", "deepspeed1"), 1.0, strict=True),
    Target("wire, stage 1 / DeepSpeed 1", "wire_bytes", "shardwell1", ("deepspeed1",), 0.68),
    Target("wire, stage 2 / DeepSpeed 2", "wire_bytes", "shardwell2", ("deepspeed2",), 0.68),
    Target("wire, stage 3 / FSDP2", "wire_bytes", "shardwell3", ("fsdp2",), 0.76),
)


def judged(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """A verdict per target; ``met`` is None where a side was not measured. A wrong contender meets nothing."""
    verdicts: list[dict[str, Any]] = []
    for target in TARGETS:
        ours = summary.get(target.ours)
        peers = [summary[name] for name in target.peers if name in summary and summary[name]["right"]]
        values = [peer[target.figure] for peer in peers if peer[target.figure]]
        ratio: float | None = None
        met: bool | None = None
        if ours is not None and values and ours[target.figure] is not None:
            ratio = ours[target.figure] / min(values)
            met = ours["right"] and (ratio < target.factor if target.strict else ratio <= target.factor)
        sign = "<" if target.strict else "<="
        verdicts.append({"label": target.label, "demand": f"{sign} {target.factor:.2f}", "ratio": ratio, "met": met})
    return verdicts


def targets_table(verdicts: list[dict[str, Any]]) -> Table:
    """The targets, what was measured, and pass or fail."""
    table = Table(title="targets (ratios of medians)", title_justify="left")
    for heading in ("target", "demand", "measured", ""):
        table.add_column(heading, justify="left" if heading in ("target", "") else "right")
    marks = {True: "[green]pass[/green]", False: "[red]FAIL[/red]", None: "[dim]not measured[/dim]"}
    for verdict in verdicts:
        ratio = "-" if verdict["ratio"] is None else f"{verdict['ratio']:.3f}"
        table.add_row(verdict["label"], verdict["demand"], ratio, marks[verdict["met"]])
    return table


def ratio_to(figures: dict[str, Any], other: dict[str, Any] | None, key: str) -> str:
    """How a figure compares with another contender's, for a table cell."""
    if other is None or not other[key] or figures[key] is None:
        return "-"
    return f"{figures[key] / other[key]:.2f}"


def mib(value: float | None) -> str:
    """Bytes as MiB for a table cell."""
    return "-" if value is None else f"{value / MIB:.0f}"


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("s/step", lambda f: f"{f['seconds']:.3f}"),
    ("CPU-s", lambda f: f"{f['cpu_seconds']:.3f}"),
    ("peak MiB", lambda f: mib(f["peak_bytes"])),
    ("rest MiB", lambda f: mib(f["rest_bytes"])),
    ("heap peak", lambda f: mib(f["heap_peak_bytes"])),
    ("wire MiB", lambda f: mib(f["wire_bytes"])),
    ("ring MiB", lambda f: mib(f["payload_bytes"])),
    ("loss", lambda f: f"{f['loss']:.4f}"),
    ("off DDP", lambda f: "-" if f["loss_deviation"] is None else f"{f['loss_deviation']:.0e}"),
)


def peers_table(summary: dict[str, Any], title: str) -> Table:
    """Absolute figures of every contender, and its CPU time, peak and wire against DDP and FSDP2."""
    table = Table(title=title, title_justify="left", caption_justify="left", caption=CAPTION)
    table.add_column("engine", no_wrap=True)
    for heading, _ in COLUMNS:
        table.add_column(heading, justify="right")
    for heading in ("CPU /DDP", "peak /DDP", "CPU /FSDP", "peak /FSDP", "wire /FSDP"):
        table.add_column(heading, justify="right")
    ddp, fsdp2 = summary.get("ddp"), summary.get("fsdp2")
    for name, figures in summary.items():
        label = name if figures["right"] else f"{name} [red]WRONG[/red]"
        table.add_row(
            label,
            *(cell(figures) for _, cell in COLUMNS),
            ratio_to(figures, ddp, "cpu_seconds"),
            ratio_to(figures, ddp, "peak_bytes"),
            ratio_to(figures, fsdp2, "cpu_seconds"),
            ratio_to(figures, fsdp2, "peak_bytes"),
            ratio_to(figures, fsdp2, "wire_bytes"),
        )
    return table


CAPTION = (
    "s/step: median wall time. CPU-s: user + system per rank and step. peak, rest: live tensor MiB per rank, in a step "
    "and between steps. heap peak: the same from malloc, gloo's staging included. wire: MiB a step over loopback, all "
    "ranks together, as sent. ring: the MiB that the issued collectives would need in a ring. off DDP: largest "
    "difference of a loss."
)
