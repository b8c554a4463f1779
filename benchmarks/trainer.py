"""Transformers' Trainer on one GPU: shardwell under DeepSpeed's name, DeepSpeed itself, and FSDP2.

    python -m benchmarks.trainer [--size 1b] [--only NAME,...] [--rounds 1] [--peer FOLDER] [--json PATH]

A Llama with random weights is fine-tuned in bf16 with AdamW, clipping at 1.0 and gradient checkpointing. The case
`grpo` generates completions with the sharded model and then trains on them, as GRPO does at each step. Every contender
runs the same script in a process of its own; only the launch and the configuration differ. `--peer` names the folder
that DeepSpeed is installed in, if it is not on the path. With ``--device cpu --size tiny`` the same code runs anywhere,
for its own sake and not for its numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu import interleave
from benchmarks.launch import RunFailedError, free_port, without_folders
from benchmarks.measure import circumstances, command_line, keep, told

GIB = 2**30
WORKER = "benchmarks.trainer_worker"


@dataclass(frozen=True)
class Case:
    """One row: the engine that `deepspeed` means, or FSDP2, and what it runs."""

    engine: str  # shardwell, deepspeed or fsdp2
    task: str  # "fine-tune" or "grpo"
    stage: int = 0
    offload: bool = False

    @property
    def name(self) -> str:
        """The name of the row."""
        stage = str(self.stage) if self.stage else ""
        return f"{self.engine}{stage}{':offload' if self.offload else ''}:{self.task}"


CASES = (
    *(Case(engine, "fine-tune", 2, True) for engine in ("shardwell", "deepspeed")),
    *(Case(engine, "fine-tune", 3) for engine in ("shardwell", "deepspeed")),
    Case("fsdp2", "fine-tune"),
    *(Case(engine, "grpo", 3) for engine in ("shardwell", "deepspeed")),
    Case("fsdp2", "grpo"),
)


def run_case(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one run."""
    with tempfile.TemporaryDirectory(prefix="shardwell-bench-") as folder:
        spec = {"engine": case.engine, "task": case.task, "stage": case.stage, "offload": case.offload}
        spec |= {"size": args.size, "steps": args.steps, "device": args.device, "folder": folder}
        way_in = ["-m", "shardwell.compat.deepspeed"] if case.engine == "shardwell" else []
        rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environment = {**os.environ, **rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if case.engine == "deepspeed" and args.peer:
            environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), args.peer])
        log = Path(folder, "log")
        with log.open("wb") as output:
            command = [sys.executable, *way_in, "-m", WORKER, json.dumps(spec)]
            try:
                done = subprocess.run(
                    command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=args.limit, check=False
                )
            except subprocess.TimeoutExpired:
                raise RunFailedError(f"failed: no result within {args.limit:.0f} s") from None
        if done.returncode:
            raise RunFailedError("failed: " + without_folders(log.read_text(errors="replace")[-1500:], 1200))
        found: dict[str, Any] = json.loads(Path(folder, "figures.json").read_text())
        return found


def summarise(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the median of the seconds and the largest peaks of each row that has figures."""
    return {
        name: {
            "seconds": statistics.median(figures["seconds"] for figures in entry["rounds"]),
            "peak_allocated": max(figures["peak_allocated"] or 0 for figures in entry["rounds"]),
            "rss_peak": max(figures["rss_peak"] for figures in entry["rounds"]),
            "loss": entry["rounds"][0]["losses"][-1],
        }
        for name, entry in raw.items()
        if entry["rounds"]
    }


def table_of(summary: dict[str, Any], title: str) -> Table:
    """Return the figures of all rows."""
    table = Table(title=title, title_justify="left")
    table.add_column("run", no_wrap=True)
    for heading in ("s/step", "peak GiB", "host GiB", "last loss"):
        table.add_column(heading, justify="right")
    for name, figures in summary.items():
        sizes = (f"{figures[key] / GIB:.2f}" for key in ("peak_allocated", "rss_peak"))
        table.add_row(name, f"{figures['seconds']:.4f}", *sizes, f"{figures['loss']:.4f}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and keep the raw figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1b", choices=("tiny", "1b"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="parts of names of rows, with commas")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which a run has failed")
    parser.add_argument("--peer", help="the folder that DeepSpeed is installed in")
    parser.add_argument("--json", help="where the raw figures go")
    args, console = parser.parse_args(argv), Console()
    wanted = args.only.split(",")
    cases = {case.name: case for case in CASES if any(part in case.name for part in wanted)}
    raw = interleave(dict.fromkeys(cases), args.rounds, lambda name: run_case(cases[name], args), console)
    report: dict[str, Any] = {**circumstances(command_line("trainer", argv), args.device)}
    report |= {"summary": summarise(raw), "raw": raw}
    console.print(table_of(report["summary"], f"Trainer, Llama {args.size}, bf16, one {args.device}"))
    for name, entry in raw.items():
        if entry["error"]:
            console.print(f"{name}: {entry['error']}", markup=False, highlight=False)
    console.print(told(report), highlight=False)
    if path := keep(report, "trainer", args.json):
        console.print(f"raw results: {path}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
