"""What a campaign tried and what came of it, and the command line that all campaigns share.

    python -m tests.campaigns.NAME [--count N] [--seed N] [--minutes N] [--jobs N] [--json FILE]

A campaign draws its cases from the seed, and ends after so many cases or minutes. With `--jobs` several of them run
beside each other, each with a seed of its own, and count as one. The exit code is 1 if a case came out as none must.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

import shardwell

SHOWN = 20  # of what must not be, how many are printed
EVERY = 2.0  # seconds between two writes of what came of it so far


@dataclass
class Result:
    """Counts by outcome, and words for each case that came out as it must not."""

    campaign: str
    outcomes: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)  # what else is worth counting, by name
    slowest: dict[str, float] = field(default_factory=dict)  # the most seconds that something took, by name
    seconds: float = 0.0
    kept_in: ClassVar[Path | None] = None  # what came of it so far is written there, for a campaign that is killed
    command: ClassVar[str] = ""
    _kept_at: ClassVar[float] = 0.0

    @property
    def tried(self) -> int:
        return self.outcomes.total()

    def count(self, outcome: str, problem: str = "") -> None:
        """One case. It is bad if there is a problem to tell."""
        self.outcomes[outcome] += 1
        if problem:
            self.bad.append(problem)
        if time.monotonic() - Result._kept_at > EVERY:
            self.keep()

    def keep(self) -> None:
        """Write what came of it so far, where that is asked for."""
        Result._kept_at = time.monotonic()
        if self.kept_in is not None:
            temporary = self.kept_in.with_suffix(".new")
            temporary.write_text(json.dumps(self.to_dict(self.command), indent=2) + "\n")
            temporary.replace(self.kept_in)

    def took(self, what: str, seconds: float) -> None:
        self.slowest[what] = round(max(self.slowest.get(what, 0.0), seconds), 1)

    def add(self, other: dict[str, Any]) -> None:
        """What another campaign of the same kind wrote as JSON."""
        self.outcomes.update(other["outcomes"])
        self.bad += other["bad"]
        self.figures.update(other["figures"])
        for what, seconds in other["slowest"].items():
            self.took(what, seconds)
        self.seconds = max(self.seconds, other["seconds"])

    def to_dict(self, command: str = "") -> dict[str, Any]:
        versions = {"shardwell": shardwell.__version__, "torch": torch.__version__, "python": platform.python_version()}
        machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
        counts = {"outcomes": dict(self.outcomes), "figures": dict(self.figures)}
        return {
            **vars(self),
            **counts,
            "tried": self.tried,
            "command": command,
            "versions": versions,
            "machine": machine,
        }


Campaign = Callable[[int, int, float], Result]  # how many cases, which seed, seconds


def command_line(campaign: Campaign, module: str, words: str | None, arguments: Sequence[str] | None = None) -> int:
    """Runs a campaign as its user asks for it; the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(words or "").partition("\n\n")[0])
    parser.add_argument("--count", type=int, default=50, help="cases to try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1.0, help="end after so long, whatever the count is")
    parser.add_argument("--jobs", type=int, default=1, help="campaigns beside each other")
    parser.add_argument("--json", type=Path, help="write what came of it to this file")
    asked = parser.parse_args(arguments)
    command = f"python -m {module} --count {asked.count} --seed {asked.seed} --minutes {asked.minutes:g}"
    Result.command = command + (f" --jobs {asked.jobs}" if asked.jobs > 1 else "")
    Result.kept_in = asked.json
    result = _beside(module, asked) if asked.jobs > 1 else campaign(asked.count, asked.seed, 60 * asked.minutes)
    result.keep()
    counts = {**result.outcomes, **result.figures}
    print(f"{result.tried} tried in {result.seconds:.0f} s:", ", ".join(f"{n:,} {what}" for what, n in counts.items()))
    print(*(f"  {problem}" for problem in result.bad[:SHOWN]), sep="\n")
    return 0 if result.tried and not result.bad else 1


def _beside(module: str, asked: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for job in range(asked.jobs):
            count = asked.count // asked.jobs + (job < asked.count % asked.jobs)
            command = [sys.executable, "-m", module, "--count", str(count), "--minutes", str(asked.minutes)]
            command += ["--seed", str(asked.seed * 1000 + job), "--json", f"{folder}/{job}.json"]
            jobs.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        while any(job.poll() is None for job in jobs):
            time.sleep(EVERY)
            _sum(module, jobs, folder).keep()
        return _sum(module, jobs, folder)


def _sum(module: str, jobs: list[subprocess.Popen[bytes]], folder: str) -> Result:
    """What all jobs have told so far."""
    result = Result(module.rpartition(".")[2])
    for number, job in enumerate(jobs):
        path = Path(folder, f"{number}.json")
        if path.exists():
            result.add(json.loads(path.read_text()))
        elif job.returncode is not None:
            words = f"campaign {number} of {len(jobs)} ended with {job.returncode} and told nothing"
            result.outcomes["ended"] += 1
            result.bad.append(words)
    return result
