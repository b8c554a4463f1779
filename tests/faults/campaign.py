"""Kills ranks of a training job again and again, and checks that nothing is lost.

    python -m tests.faults.campaign --kills 100 --ranks 2 --seed 0

A job that restarts by itself (`campaign_script.py`) loses a random rank to SIGKILL at a random moment, also while it
starts and while it saves, until so many kills have happened. Then it ends, and is held against the same job without
kills.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import torch
from rich.console import Console
from rich.table import Table

from shardwell.checkpoint import Folder
from shardwell.errors import CheckpointError
from tests.cli.command import ROOT, arguments, environment

SCRIPT = ROOT / "tests" / "faults" / "campaign_script.py"
SAMPLES = 101  # of the script's data set
LIMIT = 120.0  # seconds for anything to happen
MOMENTS = {"start": 2, "training": 3, "save": 5}  # how often each is chosen
PAUSE = 0.004  # seconds after each micro-step, so that kills spread


@dataclass(frozen=True)
class Settings:
    kills: int = 100
    ranks: int = 2
    stage: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Kill:
    """One kill, and what it left behind."""

    rank: int
    moment: str  # when it was meant to hit
    left: list[str]  # new leftovers of checkpoints: partial, aside, deleted
    latest: int  # the step of the checkpoint to go on from; 0: none
    verified: int  # committed checkpoints, all of them read and compared with their checksums
    problems: list[str]


@dataclass
class Report:
    """What came of a campaign."""

    settings: Settings
    kills: list[Kill]
    steps: int
    repeated: int  # steps that were done more than once
    seconds: float
    checks: dict[str, str] = field(default_factory=dict)  # what holds -> "" or what is wrong

    @property
    def is_good(self) -> bool:
        return not any(self.checks.values())


class Job:
    """The script under `shardwell run`, in a folder of its own."""

    def __init__(self, folder: Path, settings: Settings, pause: float) -> None:
        self.folder, self.ranks = folder, settings.ranks
        self.root = folder / "checkpoints"
        self._errors = folder / "stderr"
        self._gone: set[int] = set()
        options = ("-n", settings.ranks, "--max-restarts", settings.kills)
        command = arguments("run", *map(str, options), SCRIPT, folder, str(settings.stage), str(pause))
        with self._errors.open("wb") as errors:
            self._launcher = subprocess.Popen(command, env=environment(), stdout=errors, stderr=errors)

    def close(self) -> None:
        self._launcher.kill()  # its ranks end with it
        self._launcher.wait()

    @property
    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def until(self, holds: Callable[[], Any], pause: float = 0.005) -> Any:
        """Wait for something to be true while the job lives."""
        deadline = time.monotonic() + LIMIT
        while not (result := holds()):
            if self._launcher.poll() is not None:
                raise AssertionError(f"the job ended with {self._launcher.returncode}:\n{self.errors}")
            if time.monotonic() > deadline:
                raise AssertionError(f"nothing happened for {LIMIT:g} s:\n{self.errors}")
            time.sleep(pause)
        return result

    def next_life(self) -> list[psutil.Process]:
        """The ranks, once all of them were started again, in the order of their ranks."""

        def look() -> list[psutil.Process]:
            children = psutil.Process(self._launcher.pid).children()
            fresh = [child for child in children if child.pid not in self._gone]
            return fresh if len(fresh) == self.ranks else []

        life: list[psutil.Process] = self.until(look)
        return sorted(life, key=lambda process: process.pid)

    def bury(self, life: list[psutil.Process]) -> None:
        """Wait until no rank of a life is left."""
        _, alive = psutil.wait_procs(life, timeout=LIMIT)
        assert not alive, f"ranks outlived a killed one:\n{self.errors}"
        self._gone.update(process.pid for process in life)

    def wait(self) -> int:
        return self._launcher.wait(timeout=LIMIT)

    @property
    def log_size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("samples-*"))

    def leftovers(self, state: str = "*") -> list[Path]:
        return list(self.root.glob(f".*.{state}"))


def run_with_kills(job: Job, settings: Settings) -> list[Kill]:
    chance = random.Random(settings.seed)
    kills = []
    for number in range(settings.kills):
        life = job.next_life()
        before, old = job.log_size, {path.name for path in job.leftovers()}
        (job.folder / f"go-{number}").touch()
        moment = chance.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if moment != "start":
            job.until(lambda before=before: job.log_size > before)  # type: ignore[misc]
        time.sleep(chance.uniform(0.0, 4.0 if moment == "start" else 2.0))
        if moment == "save":
            if kills:  # the first may come before anything was ever saved; the others shall have something to lose
                job.until((job.root / "latest").exists)
            job.until(lambda: job.leftovers("partial"), pause=0.0005)
            time.sleep(chance.uniform(0.0, 0.01))
        rank = chance.randrange(settings.ranks)
        life[rank].kill()
        job.bury(life)
        kills.append(look_at(job, rank, moment, old))
    return kills


def look_at(job: Job, rank: int, moment: str, old: set[str]) -> Kill:
    """What is in the folder of checkpoints now that nobody writes there."""
    tags, problems = verify(job.root)
    left = sorted(path.suffix.removeprefix(".") for path in job.leftovers() if path.name not in old)
    with contextlib.suppress(FileNotFoundError):
        latest = (job.root / "latest").read_text().strip()
        return Kill(rank, moment, left, step_of(latest), len(tags), problems)
    return Kill(rank, moment, left, 0, len(tags), problems)


def step_of(tag: str) -> int:
    return int(tag.removeprefix("global_step"))


def verify(root: Path) -> tuple[list[str], list[str]]:
    """All committed checkpoints, and what is wrong with them."""
    folder, problems = Folder(root), []
    tags = folder.tags()
    for tag in tags:
        try:
            manifest = folder.open(tag)
            for file in manifest.files:
                with folder.reader(tag, file, manifest) as reader:
                    for name in reader.entries:
                        reader.verify(name)
        except CheckpointError as error:
            problems.append(str(error))
    return tags, problems


# --- what was trained -------------------------------------------------------------------------------------------


def records(folder: Path, rank: int) -> tuple[list[tuple[list[int], str]], int]:
    """(samples, loss) of each micro-step, as it was done last; and how many were done again."""
    last: dict[int, tuple[list[int], str]] = {}
    repeated = 0
    for line in (folder / f"samples-{rank}").read_text().splitlines():
        record = json.loads(line)
        repeated += record["step"] in last
        last[record["step"]] = (record["samples"], record["loss"])
    assert sorted(last) == list(range(len(last))), f"rank {rank} left steps out"
    return [last[step] for step in range(len(last))], repeated


def misplaced_samples(steps: list[list[int]]) -> str:
    """What is wrong with the samples of all micro-steps, each over all ranks; empty if nothing is."""
    size = len(steps[0])
    steps_of_an_epoch = SAMPLES // size
    for start in range(0, len(steps), steps_of_an_epoch):
        epoch = steps[start : start + steps_of_an_epoch]
        counts = Counter(sample for step in epoch for sample in step)
        twice = [sample for sample, count in counts.items() if count > 1]
        if twice or counts.total() != len(epoch) * size:
            return f"micro-steps {start} on: samples {twice} more than once"
    return ""


def values_of(root: Path, tag: str) -> dict[str, Any]:
    """Every tensor and value of a checkpoint."""
    folder = Folder(root)
    manifest = folder.open(tag)
    found: dict[str, Any] = dict(manifest.values)
    for name, record in manifest.tensors.items():
        parts = []
        for piece in record.pieces:
            with folder.reader(tag, piece.file, manifest) as reader:
                parts.append(reader.read(piece.key))
        found[name] = torch.cat(parts) if parts else torch.empty(0)
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return bool(a == b)

    return sorted(
        name for name in {*one, *other} if name not in one or name not in other or not same(one[name], other[name])
    )


# --- the whole --------------------------------------------------------------------------------------------------


def campaign(folder: Path, settings: Settings) -> Report:
    """Run, kill, run again without kills, compare."""
    began = time.monotonic()
    (folder / "killed").mkdir(parents=True)
    (folder / "quiet").mkdir()
    with contextlib.closing(Job(folder / "killed", settings, PAUSE)) as killed:
        kills = run_with_kills(killed, settings)
        killed.next_life()
        before = killed.log_size
        (killed.folder / f"go-{settings.kills}").touch()
        killed.until(lambda: killed.log_size > before)
        steps = 1 + len(records(killed.folder, 0)[0]) // 2
        _write(killed.folder / "stop-at", str(steps))
        code = killed.wait()
    assert code == 0, killed.errors
    tag = (killed.root / "latest").read_text().strip()
    quiet = _without_kills(folder / "quiet", settings, step_of(tag))
    report = Report(settings, kills, step_of(tag), 0, 0.0)
    _check(report, killed, quiet, tag)
    report.seconds = round(time.monotonic() - began, 1)
    return report


def _write(path: Path, text: str) -> None:
    """At once, for those who look for the file."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.rename(path)


def _without_kills(folder: Path, settings: Settings, steps: int) -> Job:
    (folder / "go-0").touch()
    _write(folder / "stop-at", str(steps))
    with contextlib.closing(Job(folder, settings, 0.0)) as job:
        assert job.wait() == 0, job.errors
    return job


def _check(report: Report, killed: Job, quiet: Job, tag: str) -> None:
    ranks = range(report.settings.ranks)
    found = [records(killed.folder, rank) for rank in ranks]
    expected = [records(quiet.folder, rank)[0] for rank in ranks]
    report.repeated = found[0][1]
    micro_steps = [[sample for rank in ranks for sample in found[rank][0][step][0]] for step in range(len(expected[0]))]
    at_the_end = verify(killed.root)[1]
    latest = [kill.latest for kill in report.kills]
    restarts = killed.errors.count("; restart ")
    different = differences(values_of(killed.root, tag), values_of(quiet.root, tag))
    left = [path.name for path in killed.root.iterdir() if path.name.startswith(".")]
    report.checks = {
        "every kill was one restart": "" if restarts == len(report.kills) else f"{restarts} restarts:\n{killed.errors}",
        "every committed checkpoint verifies": "; ".join(
            [p for kill in report.kills for p in kill.problems] + at_the_end
        ),
        "the checkpoint to go on from never gets older": "" if latest == sorted(latest) else f"steps {latest}",
        "no sample is skipped or seen twice": misplaced_samples(micro_steps),
        "samples and losses of every step are those of a quiet run": _first_difference(found, expected),
        "parameters, optimizer, schedule, position and random states too": ", ".join(different),
        "nothing is left beside the checkpoints": ", ".join(left),
    }


def _first_difference(found: list[tuple[list[Any], int]], expected: list[list[Any]]) -> str:
    for rank, ((mine, _), theirs) in enumerate(zip(found, expected, strict=True)):
        if mine != theirs:
            step = next((s for s, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), "count")
            return f"rank {rank}, micro-step {step}"
    return ""


def show(report: Report, console: Console) -> None:
    kills = report.kills
    table = Table(title=f"{len(kills)} kills of {report.settings.ranks} ranks at stage {report.settings.stage}")
    for column in ("meant to hit", "kills", "left a partial", "left an old one", "left a removal"):
        table.add_column(column, justify="left" if column == "meant to hit" else "right")
    for moment in MOMENTS:
        hit = [kill for kill in kills if kill.moment == moment]
        states = [sum(state in kill.left for kill in hit) for state in ("partial", "aside", "deleted")]
        table.add_row(moment, *map(str, [len(hit), *states]))
    console.print(table)
    console.print(
        f"{report.steps} steps, {report.repeated} micro-steps repeated, {sum(kill.verified for kill in kills)} "
        f"checkpoints verified after kills, {report.seconds:.0f} s"
    )
    for claim, problem in report.checks.items():
        console.print(f"{'FAILED' if problem else 'pass':6}  {claim}{': ' if problem else ''}{problem}", markup=False)


@contextlib.contextmanager
def _folder(path: Path | None) -> Iterator[Path]:
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="shardwell-campaign-") as temporary:
        yield Path(temporary)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill ranks of a training job and check that nothing is lost.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="a new folder to work in; it is kept")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    asked = parser.parse_args()
    with _folder(asked.folder) as folder:
        report = campaign(folder, Settings(asked.kills, asked.ranks, asked.stage, asked.seed))
    show(report, Console())
    if asked.out is not None:
        asked.out.write_text(json.dumps({"torch": torch.__version__, **asdict(report)}, indent=2) + "\n")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
