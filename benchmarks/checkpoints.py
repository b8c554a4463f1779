"""Saving and loading beside torch.distributed.checkpoint (over FSDP2) and DeepSpeed 3, all in one run on CPU ranks.

    python -m benchmarks.checkpoints [--ranks 2,4] [--size medium] [--rounds 3] [--folder PATH] [--json PATH]

Every contender saves in fresh processes and loads in fresh processes, once a round, rounds interleaved in alternating
order; figures are medians over rounds. It is measured in two places: a file system in memory (what the software itself
costs), and the disk under ``--folder``. DeepSpeed returns before its bytes are on the disk, so there the time until all
bytes are durable is what compares. Loads find the files in the page cache, for all alike. With more than one number of
ranks, each loads what the others saved. A contender that loads other values than were saved is marked as wrong and
meets no target.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints_worker import KEPT, LATER
from benchmarks.contenders import PEER_CONTENDERS, by_name
from benchmarks.launch import RunFailedError, run_ranks
from benchmarks.measure import command_line, machine, versions
from benchmarks.model import PRESETS
from benchmarks.report import mib, targets_table

RESULTS = Path(__file__).parent / "results"
WORKER = "benchmarks.checkpoints_worker"
IN_MEMORY = Path("/dev/shm")
REQUIRED = {"dcp": "fsdp2", "deepspeed3": "deepspeed3", "shardwell1": "shardwell1", "shardwell3": "shardwell3"}
OURS, PEERS = "shardwell3", ("dcp", "deepspeed3")
STATE_BYTES = 12  # a parameter's: itself and two moments, in fp32
SLACK = 1.01  # of bytes that are needed: random states and buffers


@dataclass(frozen=True)
class Figure:
    """A figure: in the columns of a table, and how the rounds are put together."""

    key: str
    heading: str
    show: Callable[[float], str] = "{:.2f}".format
    over_rounds: Callable[[list[float]], float] = statistics.median


SAVING = (
    Figure("save_seconds", "save s"),
    Figure("durable_seconds", "durable s"),
    Figure("save_cpu", "CPU-s"),
    Figure("save_growth", "growth MiB", mib, max),
    Figure("bytes", "MiB on disk", mib),
    Figure("load_seconds", "load s"),
    Figure("load_cpu", "CPU-s"),
    Figure("load_growth", "growth MiB", mib, max),
    Figure("load_read", "read MiB", mib),
    Figure("first_stall", "stall s: first"),
    Figure("stall", "second"),
    Figure("slowed", "steps slowed s"),
    Figure("done_seconds", "done after s"),
)
ELSEWHERE = (
    Figure("load_seconds", "load s"),
    Figure("load_cpu", "CPU-s"),
    Figure("load_growth", "growth MiB", mib, max),
    Figure("load_read", "read MiB", mib),
    Figure("needed", "needed MiB", mib),
)


# ------------------------------------------------------------------------------------------------------ measuring


@contextlib.contextmanager
def places_of(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """A new directory in memory, where there is room for it, and one on the disk."""
    needed = 4 * STATE_BYTES * PRESETS[args.size].num_parameters
    with contextlib.ExitStack() as stack:
        places = {}
        if IN_MEMORY.is_dir() and os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > needed:
            places["memory"] = stack.enter_context(tempfile.TemporaryDirectory("-bench", "shardwell-", IN_MEMORY))
        places["disk"] = stack.enter_context(tempfile.TemporaryDirectory("-bench", "shardwell-", args.folder))
        yield places


def file_system(path: str) -> str:
    """The kind of file system that holds a path."""
    mounts = [part for part in psutil.disk_partitions(all=True) if Path(path).is_relative_to(part.mountpoint)]
    return str(max(mounts, key=lambda part: len(part.mountpoint)).fstype) if mounts else "unknown"


def measure(name: str, ranks: int, args: argparse.Namespace, places: dict[str, str]) -> dict[str, Any]:
    """One round of one contender: save everywhere, load from everywhere, load with other numbers of ranks."""
    folders = {place: tempfile.mkdtemp(dir=root) for place, root in places.items()}
    spec = {"contender": name, "size": args.size, "places": folders, "expected": None, "may_refuse": False}
    try:
        saved = run_ranks(WORKER, spec, ranks, args.limit)
        expected = {place: Path(folder, "expected.json") for place, folder in folders.items()}
        for place, path in expected.items():
            path.write_text(json.dumps({KEPT: saved[0][KEPT], LATER: saved[0].get(f"{LATER} {place}")}))

        def load(place: str, with_ranks: int) -> list[dict[str, Any]]:
            more = {"expected": str(expected[place]), "from": folders[place], "may_refuse": with_ranks != ranks}
            return run_ranks(WORKER, {**spec, **more}, with_ranks, args.limit)

        first = next(iter(places))
        return {
            "places": {
                place: _at_home([rank["places"][place] for rank in saved], load(place, ranks)) for place in places
            },
            "elsewhere": {str(other): _loaded(load(first, other)) for other in args.ranks if other != ranks},
        }
    finally:
        for folder in folders.values():
            shutil.rmtree(folder)


def _at_home(saved: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all ranks as those of one round: the slowest rank, the CPU time of all."""
    second = [rank["second"] for rank in saved]
    figures = {
        "save_seconds": max(rank["seconds"] for rank in second),
        "durable_seconds": max(rank["durable_seconds"] for rank in second),
        "save_cpu": sum(rank["cpu_seconds"] for rank in second),
        "save_growth": max(rank[when]["growth_bytes"] for rank in saved for when in ("first", "second")),
        "first_save_seconds": max(rank["first"]["seconds"] for rank in saved),
        "bytes": max(rank["bytes"] for rank in second),
    }
    if "second_later" in saved[0]:
        later = [rank["second_later"] for rank in saved]
        figures |= {
            "first_stall": max(rank["first_later"]["stall_seconds"] for rank in saved),
            "stall": max(rank["stall_seconds"] for rank in later),
            "slowed": max(rank["slowed_seconds"] for rank in later),
            "done_seconds": max(rank["done_seconds"] for rank in later),
            "step_seconds": max(rank["step_seconds"] for rank in saved),
        }
    return {**figures, **_loaded(loaded)}


def _loaded(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    if any("refused" in rank for rank in ranks):
        return {"refused": ranks[0].get("refused", "a rank refused")}
    return {
        "load_seconds": max(rank["seconds"] for rank in ranks),
        "load_cpu": sum(rank["cpu_seconds"] for rank in ranks),
        "load_growth": max(rank["growth_bytes"] for rank in ranks),
        "load_read": max(rank["read_bytes"] for rank in ranks),
        "own_read": max(rank["own_read_bytes"] or rank["read_bytes"] for rank in ranks),
        "needed": max(STATE_BYTES * rank["held"] for rank in ranks),
        "right": all(rank["right"] and rank.get("right_later", True) for rank in ranks),
    }


def measure_all(names: Sequence[str], args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All rounds: raw figures by contender and number of ranks, or the line that says why there are none."""
    raw: dict[str, Any] = {name: {"error": by_name(PEER_CONTENDERS, REQUIRED[name]).missing()} for name in names}
    with places_of(args) as places:
        for number in range(args.rounds):
            for ranks in args.ranks:
                for name in names if number % 2 == 0 else reversed(names):
                    if raw[name]["error"]:
                        continue
                    console.print(f"[dim]round {number + 1}, {ranks} ranks: {name}[/dim]", highlight=False)
                    try:
                        raw[name].setdefault(str(ranks), []).append(measure(name, ranks, args, places))
                    except RunFailedError as failure:
                        raw[name]["error"] = str(failure)
        kinds = {place: file_system(folder) for place, folder in places.items()}
    return {"file_systems": kinds, "contenders": raw}


# -------------------------------------------------------------------------------------------------------- judging


def _together(rounds: list[dict[str, Any]], figures: Sequence[Figure]) -> dict[str, Any]:
    """Medians over rounds; one wrong round is enough to be wrong."""
    if any("refused" in one for one in rounds):
        return {"refused": next(one["refused"] for one in rounds if "refused" in one)}
    ways = {figure.key: figure.over_rounds for figure in figures}
    keys = [key for key in rounds[0] if key != "right"]
    result: dict[str, Any] = {key: ways.get(key, statistics.median)([one[key] for one in rounds]) for key in keys}
    return {**result, "right": all(one["right"] for one in rounds)}


def summarise(raw: dict[str, Any]) -> dict[str, Any]:
    """By situation ("2 ranks, memory", "2 to 4 ranks") and contender."""
    summary: dict[str, Any] = {}
    for name, entry in raw.items():
        for ranks, rounds in entry.items():
            if ranks == "error" or not rounds:
                continue
            for place in rounds[0]["places"]:
                found = _together([one["places"][place] for one in rounds], SAVING)
                summary.setdefault(f"{ranks} ranks, {place}", {})[name] = found
            for other in rounds[0]["elsewhere"]:
                found = _together([one["elsewhere"][other] for one in rounds], ELSEWHERE)
                summary.setdefault(f"{ranks} to {other} ranks", {})[name] = found
    return summary


def judged(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets: at least as fast as each peer, no more bytes than needed, and a save in the background that pays."""
    verdicts: list[dict[str, Any]] = []

    def judge(label: str, ours: dict[str, Any], value: float, limit: float | None, demand: float = 1.0) -> None:
        ratio = None if not limit else value / limit
        met = None if ratio is None else bool(ours["right"]) and ratio <= demand
        verdicts.append({"label": label, "demand": f"<= {demand:.2f}", "ratio": ratio, "met": met})

    for situation, figures in summary.items():
        ours = figures.get(OURS)
        if ours is None:
            continue
        peers = {name: figures[name] if figures.get(name, {}).get("right") else {} for name in PEERS}
        for name, peer in peers.items():
            if "save_seconds" in ours:
                key = "durable_seconds" if situation.endswith("disk") else "save_seconds"
                judge(f"{situation}: save / {name}", ours, ours[key], peer.get(key))
            if "load_seconds" in peer or "refused" not in figures.get(name, {}):
                judge(f"{situation}: load / {name}", ours, ours["load_seconds"], peer.get("load_seconds"))
        if "stall" in ours:
            judge(f"{situation}: stall / own save", ours, ours["stall"], ours["save_seconds"])
            judge(f"{situation}: stall / stall of dcp", ours, ours["stall"], peers["dcp"].get("stall"))
        else:
            judge(f"{situation}: read / needed", ours, ours["own_read"], ours["needed"], SLACK)
    return verdicts


# ------------------------------------------------------------------------------------------------------- printing


def table_of(situation: str, contenders: dict[str, Any], figures: Sequence[Figure]) -> Table:
    """Absolute figures of all contenders, and what those of each of ours are in those of each peer."""
    table = Table(title=situation, title_justify="left", caption_justify="left")
    table.add_column("engine", no_wrap=True)
    for figure in figures:
        table.add_column(figure.heading, justify="right")
    for name, found in contenders.items():
        if "refused" in found:
            table.add_row(name, "refused")
            continue
        label = name if found["right"] else f"{name} [red]WRONG[/red]"
        table.add_row(label, *(figure.show(found[figure.key]) if figure.key in found else "-" for figure in figures))
    for ours in (name for name in contenders if name.startswith("shardwell")):
        for peer in (name for name in PEERS if name in contenders):
            one, other = contenders[ours], contenders[peer]
            ratios = [_ratio(one.get(figure.key), other.get(figure.key)) for figure in figures]
            table.add_row(f"[dim]{ours} / {peer}[/dim]", *ratios)
    return table


def _ratio(one: float | None, other: float | None) -> str:
    return "-" if one is None or not other or other < 0 else f"[dim]{one / other:.2f}[/dim]"


CAPTION = (
    "save, load: seconds until the slowest rank returns. durable: until all bytes are on the disk. CPU-s: user + "
    "system of all ranks. growth: the peak of a rank's resident memory above what it was. read: bytes read by a rank. "
    "stall: what a save in the background holds up the training loop, the first time and the second. steps slowed: "
    "what the two steps after it take longer than usual, together."
)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoints", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--ranks", default="2", metavar="N,...", help="numbers of processes (default 2)")
    parser.add_argument("--size", choices=sorted(PRESETS), default="medium", help="the decoder (default medium)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--only", default=",".join(REQUIRED), metavar="NAME,...", help="a subset of the contenders")
    parser.add_argument("--folder", default=None, metavar="PATH", help="where the disk is (default: temporary files)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds until a process is stopped (default 600)")
    parser.add_argument("--json", default=None, metavar="PATH", help="raw results; '-' for none (default results/)")
    args = parser.parse_args(argv)
    args.ranks = [int(number) for number in args.ranks.split(",")]
    args.only = [name for name in args.only.split(",") if name]
    if unknown := [name for name in args.only if name not in REQUIRED]:
        parser.error(f"--only {','.join(unknown)}: choose from {', '.join(REQUIRED)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, keep the raw figures; the exit status is 1 when a target was measured and missed."""
    args = parse_arguments(argv)
    console = Console(width=max(Console().width, 170))
    raw = measure_all(args.only, args, console)
    summary = summarise(raw["contenders"])
    verdicts = judged(summary)
    report: dict[str, Any] = {
        "command": command_line("checkpoints", argv),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": {**machine(), "file_systems": raw["file_systems"]},
        "versions": versions(),
        "parameters": PRESETS[args.size].num_parameters,
        "summary": summary,
        "targets": verdicts,
        "raw": raw["contenders"],
    }
    console.print(f"{report['command']}  ({report['parameters'] / 1e6:.1f}M parameters, fp32)", highlight=False)
    for situation, contenders in summary.items():
        is_home = any("save_seconds" in found for found in contenders.values())
        console.print(table_of(situation, contenders, SAVING if is_home else ELSEWHERE))
    console.print(CAPTION, highlight=False)
    for situation, contenders in summary.items():
        for name, found in contenders.items():
            if "refused" in found:
                console.print(f"{situation}: {name}: {found['refused']}", highlight=False, markup=False)
    for name, entry in raw["contenders"].items():
        if entry["error"]:
            console.print(f"{name}: {entry['error']}", highlight=False, markup=False)
    if "memory" not in raw["file_systems"]:
        console.print(f"not measured in memory: {IN_MEMORY} is missing or too small", highlight=False)
    console.print(targets_table(verdicts))
    found = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    console.print(f"{report['machine']['cpu']}, {report['machine']['cores']} cores; {found}", highlight=False)
    if args.json != "-":
        path = Path(args.json) if args.json else RESULTS / f"checkpoints-{report['date'][:10]}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"raw results: {path}", highlight=False)
    return 1 if any(verdict["met"] is False for verdict in verdicts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
