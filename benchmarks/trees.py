"""Saving, loading and steps of two source trees of shardwell, before and after a change, in one run on CPU ranks.

    git worktree add ../before COMMIT
    (cd ../before && cmake -S native -B build && cmake --build build && cmake --install build --prefix src)
    cmake -S native -B build && cmake --build build && cmake --install build --prefix src
    python -m benchmarks.trees --before ../before [--size medium] [--rounds 20] [--json PATH]

The ranks of both trees live side by side during the whole run and take turns, in alternating order, so that what else
the machine does disturbs both alike. Each tree saves on two ranks and loads its own checkpoint, from a file system in
memory. Figures are CPU seconds of all ranks together; the ratio is the median over rounds of after / before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.launch import free_port, rank_environment
from benchmarks.measure import circumstances, command_line, keep, told
from benchmarks.model import PRESETS

HERE = Path(__file__).resolve().parents[1]
BEFORE, AFTER = "before", "after"
TAG = "measured"


@dataclass(frozen=True)
class Situation:
    """What is measured: an action of some ranks at a stage. All loads are of what two ranks saved at stage 3."""

    label: str
    action: str
    ranks: int
    stage: int


SITUATIONS = (
    Situation("step", "step", 2, 3),
    Situation("save", "save", 2, 3),
    Situation("load, same layout", "load", 2, 3),
    Situation("load, stage 3 to 1", "load", 2, 1),
    Situation("load, 2 to 3 ranks", "load", 3, 3),
)


class Ranks:
    """The living ranks of one tree."""

    def __init__(self, tree: Path, ranks: int, spec: dict[str, Any]) -> None:
        libraries = list((tree / "src" / "shardwell").rglob("libshardwell_native.so"))
        if not libraries:
            raise SystemExit(f"{tree}: its native library is not built: see python -m benchmarks.trees --help")
        # without site, an editable installation does not hide the tree
        path = os.pathsep.join([str(tree / "src"), str(HERE), sysconfig.get_path("purelib")])
        port = free_port()
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-S", "-m", "benchmarks.trees_worker", json.dumps(spec)],
                env={**rank_environment(rank, ranks, port, "cpu"), "PYTHONPATH": path, "SHARDWELL_DEVICE": "cpu"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        for answer in self._answers():
            if not Path(answer["tree"]).is_relative_to(tree):
                raise SystemExit(f"{tree}: a rank has imported {answer['tree']}")

    def _answers(self) -> list[dict[str, Any]]:
        lines = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if not all(lines):
            raise SystemExit("a rank has ended; its words are above")
        return [json.loads(line) for line in lines]

    def do(self, action: str, folder: str, tag: str) -> dict[str, float]:
        """Have all ranks do it; return the CPU seconds of all, and the seconds of the slowest."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": action, "folder": folder, "tag": tag}) + "\n")
            process.stdin.flush()
        answers = self._answers()
        return {
            "cpu_seconds": sum(answer["cpu_seconds"] for answer in answers),
            "seconds": max(answer["seconds"] for answer in answers),
        }

    def close(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def living(trees: dict[str, Path], ranks: int, spec: dict[str, Any]) -> Iterator[dict[str, Ranks]]:
    with contextlib.ExitStack() as stack:
        found = {name: Ranks(tree, ranks, spec) for name, tree in trees.items()}
        for one in found.values():
            stack.callback(one.close)
        yield found


def measure(
    situation: Situation, ranks: dict[str, Ranks], folders: dict[str, str], rounds: int
) -> dict[str, list[dict[str, float]]]:
    """All rounds of one situation. The first of each tree is kept apart: memory is new to it."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ranks}
    for number in range(rounds + 1):
        for name in list(ranks) if number % 2 == 0 else reversed(list(ranks)):
            folder, tag = folders[name], f"round{number}" if situation.action == "save" else TAG
            found[name].append(ranks[name].do(situation.action, folder, tag))
            if situation.action == "save":
                shutil.rmtree(Path(folder, tag))
    return found


def measure_all(trees: dict[str, Path], args: argparse.Namespace, console: Console) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory("-bench", "shardwell-", args.folder) as root:
        folders = {name: str(Path(root, name)) for name in trees}
        wanted = [one for one in SITUATIONS if args.only in one.label]
        if not any((one.ranks, one.stage) == (2, 3) for one in wanted):
            wanted.insert(0, SITUATIONS[0])  # these ranks save what is loaded
        for layout in dict.fromkeys((one.ranks, one.stage) for one in wanted):
            spec = {"size": args.size, "stage": layout[1], "seq": args.seq}
            with living(trees, layout[0], spec) as ranks:
                if not raw:
                    for name, one in ranks.items():
                        one.do("step", folders[name], TAG)
                        one.do("save", folders[name], TAG)
                for situation in wanted:
                    if (situation.ranks, situation.stage) == layout:
                        console.print(f"[dim]{situation.label}[/dim]", highlight=False)
                        raw[situation.label] = measure(situation, ranks, folders, args.rounds)
    return raw


def summarise(raw: dict[str, Any]) -> dict[str, Any]:
    """By situation: medians and least CPU seconds of each tree, the ratio, and the quartiles of it over rounds."""
    summary = {}
    for label, found in raw.items():
        series = {name: [one["cpu_seconds"] for one in found[name][1:]] for name in (BEFORE, AFTER)}
        ratios = [after / before for before, after in zip(series[BEFORE], series[AFTER], strict=True)]
        summary[label] = {
            **{f"{name}_cpu_seconds": statistics.median(series[name]) for name in series},
            **{f"{name}_least_cpu_seconds": min(series[name]) for name in series},
            "ratio": statistics.median(ratios),
            "ratio_of_least": min(series[AFTER]) / min(series[BEFORE]),
            "quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios,
            "first": found[AFTER][0]["cpu_seconds"] / found[BEFORE][0]["cpu_seconds"],
        }
    return summary


def table_of(summary: dict[str, Any]) -> Table:
    table = Table(caption="CPU seconds of all ranks; medians", caption_justify="left")
    for heading in ("", "before", "after", "after / before", "quartiles", "of the least"):
        table.add_column(heading, justify="left" if not heading else "right")
    for label, found in summary.items():
        quartiles = " to ".join(f"{found['quartiles'][index]:.2f}" for index in (0, -1))
        seconds = [f"{found[f'{name}_cpu_seconds']:.3f}" for name in (BEFORE, AFTER)]
        table.add_row(label, *seconds, f"{found['ratio']:.3f}", quartiles, f"{found['ratio_of_least']:.3f}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trees", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, metavar="PATH", help="the other tree, with its library built")
    parser.add_argument("--commit", default=None, help="what the other tree is, for the report")
    parser.add_argument("--size", choices=sorted(PRESETS), default="medium", help="the decoder (default medium)")
    parser.add_argument("--seq", type=int, default=32, help="tokens of a step (default 32)")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds (default 20)")
    parser.add_argument("--only", default="", metavar="WORD", help="what has this in its name, such as load")
    parser.add_argument("--folder", default="/dev/shm", metavar="PATH", help="where checkpoints are (default /dev/shm)")
    parser.add_argument("--json", default=None, metavar="PATH", help="raw results; '-' for none (default results/)")
    args = parser.parse_args(argv)
    console = Console(width=max(Console().width, 120))
    trees = {BEFORE: Path(args.before).resolve(), AFTER: HERE}
    raw = measure_all(trees, args, console)
    report = {
        **circumstances(command_line("trees", argv), "cpu"),
        "parameters": PRESETS[args.size].num_parameters,
        "summary": summarise(raw),
        "raw": raw,
    }
    console.print(table_of(report["summary"]))
    console.print(told(report), highlight=False)
    if path := keep(report, "trees", args.json):
        console.print(f"raw results: {path}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
