"""Kills ranks of training jobs again and again, and checks that nothing is lost.

    python -m tests.campaigns.kills --count 1000 --minutes 120

A job (`kills_script.py`) loses a random rank to SIGKILL at a random moment, also while it starts and while it saves,
and is started again, until so many kills have happened. Then it ends, and is held against the same job without kills.
Stage, tier, number of ranks and launcher of each job are drawn from the seed.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import torch

from shardwell.checkpoint import Folder
from shardwell.errors import CheckpointError
from tests.campaigns.result import Result, command_line
from tests.support import preloaded
from tests.support.command import ROOT, arguments, environment, free_port
from tests.support.patience import HANG

SCRIPT = ROOT / "tests" / "campaigns" / "kills_script.py"
SAMPLES = 101  # of the script's data set
LIMIT = HANG
SURVIVAL = 15.0  # seconds after which no rank may be left of a job that has lost one
MOMENTS = {"start": 2, "training": 3, "save": 5}  # how often each is chosen
WORDS = {"start": "while it started", "training": "in training", "save": "while it saved"}
PAUSE = 0.004  # seconds after each micro-step, so that kills spread
KILLS_OF_A_JOB = 12
RUN = "shardwell run"  # it starts the ranks again by itself
LAUNCHERS = (RUN, "torchrun", "none")
TIERS = ("device", "cpu", "nvme")


@dataclass(frozen=True)
class Settings:
    kills: int = 4
    ranks: int = 2
    stage: int = 3
    tier: str = "device"
    launcher: str = RUN
    seed: int = 0
    deadline: float = float("inf")  # by time.monotonic: no kill after it


@dataclass(frozen=True)
class Kill:
    """One kill, and what it left behind."""

    rank: int
    moment: str  # when it was meant to hit
    left: list[str]  # new leftovers of checkpoints: partial, aside, deleted
    latest: int  # the step of the checkpoint to go on from; 0: none
    verified: int  # committed checkpoints, all of them read and compared with their checksums
    survived: float  # seconds until the last of the other ranks had ended
    problems: list[str]


@dataclass
class Report:
    """What came of one job."""

    settings: Settings
    kills: list[Kill]
    repeated: int = 0  # micro-steps that were done more than once
    checks: dict[str, str] = field(default_factory=dict)  # what holds -> "" or what is wrong


class Job:
    """The script, in a folder of its own. A life is what its ranks do between two kills."""

    def __init__(self, folder: Path, settings: Settings, pause: float) -> None:
        self.folder, self.settings = folder, settings
        self.root = folder / "checkpoints"
        self._errors = folder / "stderr"
        self._script = [str(part) for part in (SCRIPT, folder, settings.stage, settings.tier, pause)]
        self._started: list[subprocess.Popen[bytes]] = []  # the launcher, or the ranks themselves
        self._gone: set[int] = set()
        self._lives = 0
        (folder / "drive").mkdir(parents=True)

    def _start(self) -> None:
        num_ranks = str(self.settings.ranks)
        life = {} if self.settings.launcher == RUN else {"CAMPAIGN_LIFE": str(self._lives)}
        if self.settings.launcher == RUN:
            restarts = ("--max-restarts", str(self.settings.kills))
            commands = {"": arguments("run", "-n", num_ranks, *restarts, *self._script)}
        elif self.settings.launcher == "torchrun":
            options = ["torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
            commands = {"": [sys.executable, "-m", *options, *self._script]}
        else:
            commands = {str(rank): [sys.executable, *self._script] for rank in range(self.settings.ranks)}
            life |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": num_ranks}
            life |= {"LOCAL_WORLD_SIZE": num_ranks}
        for rank, command in commands.items():
            env = {**environment(), **life, **({"RANK": rank, "LOCAL_RANK": rank} if rank else {})}
            with self._errors.open("ab") as errors:
                self._started.append(subprocess.Popen(command, cwd=self.folder, env=env, stdout=errors, stderr=errors))

    def close(self) -> None:
        for process in self._started:
            process.kill()  # the ranks of a launcher end with it
            process.wait()

    @property
    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def until(self, holds: Callable[[], Any], pause: float = 0.005) -> Any:
        """Wait for something to be true while the job lives."""
        deadline = time.monotonic() + LIMIT
        while not (result := holds()):
            codes = [process.poll() for process in self._started]
            if any(code is not None for code in codes):
                raise AssertionError(f"the job ended with {codes}:\n{self.errors}")
            if time.monotonic() > deadline:
                raise AssertionError(f"nothing happened for {LIMIT:g} s:\n{self.errors}")
            time.sleep(pause)
        return result

    def next_life(self) -> list[psutil.Process]:
        """The ranks, once all of them were started (again), in the order of their ranks."""
        if not self._started or self.settings.launcher != RUN:
            self._started = []
            self._start()
        self._lives += 1
        if self.settings.launcher == "none":
            return [psutil.Process(process.pid) for process in self._started]

        def look() -> list[psutil.Process]:
            children = preloaded.children_of(self._started[0].pid)
            fresh = [child for child in children if child.pid not in self._gone]
            return fresh if len(fresh) == self.settings.ranks else []

        life: list[psutil.Process] = self.until(look)
        return sorted(life, key=lambda process: process.pid)

    def begin(self) -> None:
        """Let the ranks of this life load and train."""
        (self.folder / f"go-{self._lives - 1}").touch()

    def bury(self, life: list[psutil.Process]) -> float:
        """Wait until no rank of a life is left; for how many seconds."""
        begin = time.monotonic()
        _, alive = psutil.wait_procs(life, timeout=LIMIT)
        assert not alive, f"ranks outlived a killed one:\n{self.errors}"
        seconds = time.monotonic() - begin
        self._gone.update(process.pid for process in life)
        if self.settings.launcher != RUN:
            for process in self._started:
                process.wait(LIMIT)
        return seconds

    def wait(self) -> int:
        return max(abs(process.wait(timeout=LIMIT)) for process in self._started)

    @property
    def has_met(self) -> bool:
        """Whether all ranks of this life know of each other."""
        return len(list(self.folder.glob(f"met-{self._lives - 1}-*"))) == self.settings.ranks

    @property
    def log_size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("samples-*"))

    def leftovers(self, state: str = "*") -> list[Path]:
        return list(self.root.glob(f".*.{state}"))


def run_with_kills(job: Job) -> list[Kill]:
    chance = random.Random(job.settings.seed)
    kills: list[Kill] = []
    for _ in range(job.settings.kills):
        if kills and time.monotonic() > job.settings.deadline:
            break
        life = job.next_life()
        before, old = job.log_size, {path.name for path in job.leftovers()}
        job.begin()
        moment = chance.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if moment != "start":
            job.until(lambda before=before: job.log_size > before)  # type: ignore[misc]
        time.sleep(chance.uniform(0.0, 4.0 if moment == "start" else 2.0))
        if moment == "save":
            if kills:  # the first may come before anything was ever saved; the others shall have something to lose
                job.until((job.root / "latest").exists)
            job.until(lambda: job.leftovers("partial"), pause=0.0005)
            time.sleep(chance.uniform(0.0, 0.01))
        rank = chance.randrange(job.settings.ranks)
        has_met = job.has_met
        life[rank].kill()
        if job.settings.launcher == "none" and not has_met:
            for process in life:  # who waits for a rank that never came waits for as long as torch's rendezvous does
                process.kill()
        kills.append(look_at(job, rank, moment, old, job.bury(life)))
    return kills


def look_at(job: Job, rank: int, moment: str, old: set[str], survived: float) -> Kill:
    """What is in the folder of checkpoints now that nobody writes there."""
    tags, problems = verify(job.root)
    left = sorted(path.suffix.removeprefix(".") for path in job.leftovers() if path.name not in old)
    latest = job.root / "latest"
    step = step_of(latest.read_text().strip()) if latest.exists() else 0
    return Kill(rank, moment, left, step, len(tags), survived, problems)


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


def run_job(folder: Path, settings: Settings) -> Report:
    """Run, kill, run again without kills, compare."""
    with contextlib.closing(Job(folder / "killed", settings, PAUSE)) as killed:
        kills = run_with_kills(killed)
        killed.next_life()
        before = killed.log_size
        killed.begin()
        killed.until(lambda: killed.log_size > before)
        _write(killed.folder / "stop-at", str(1 + len(records(killed.folder, 0)[0]) // 2))
        code = killed.wait()
    assert code == 0, killed.errors
    tag = (killed.root / "latest").read_text().strip()
    quiet = _without_kills(folder / "quiet", settings, step_of(tag))
    report = Report(settings, kills)
    _check(report, killed, quiet, tag)
    return report


def _write(path: Path, text: str) -> None:
    """At once, for those who look for the file."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.rename(path)


def _without_kills(folder: Path, settings: Settings, steps: int) -> Job:
    with contextlib.closing(Job(folder, settings, 0.0)) as job:
        _write(folder / "stop-at", str(steps))
        job.next_life()
        job.begin()
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
    restarts = killed.errors.count("; restart ") if report.settings.launcher == RUN else len(report.kills)
    different = differences(values_of(killed.root, tag), values_of(quiet.root, tag))
    left = [path.name for path in killed.root.iterdir() if path.name.startswith(".")]
    left += [path.name for path in (killed.folder / "drive").rglob("*") if path.is_file()]
    slow = [f"{kill.survived:.1f} s" for kill in report.kills if kill.survived > SURVIVAL]
    report.checks = {
        "every kill was one restart": "" if restarts == len(report.kills) else f"{restarts} restarts:\n{killed.errors}",
        f"no rank is left {SURVIVAL:g} s after a kill": ", ".join(slow),
        "every committed checkpoint verifies": "; ".join(
            [p for kill in report.kills for p in kill.problems] + at_the_end
        ),
        "the checkpoint to go on from never gets older": "" if latest == sorted(latest) else f"steps {latest}",
        "no sample is skipped or seen twice": misplaced_samples(micro_steps),
        "samples and losses of every step are those of a quiet run": _first_difference(found, expected),
        "parameters, optimizer, schedule, position and random states too": ", ".join(different),
        "nothing is left beside the checkpoints or on the drive": ", ".join(left),
    }


def _first_difference(found: list[tuple[list[Any], int]], expected: list[list[Any]]) -> str:
    for rank, ((mine, _), theirs) in enumerate(zip(found, expected, strict=True)):
        if mine != theirs:
            step = next((s for s, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), "count")
            return f"rank {rank}, micro-step {step}"
    return ""


def campaign(count: int, seed: int, seconds: float) -> Result:
    result, begin, draw = Result("kills"), time.monotonic(), random.Random(seed)
    while result.tried < count and time.monotonic() - begin < seconds:
        kills = min(KILLS_OF_A_JOB, count - result.tried)
        where = draw.choice(TIERS), draw.choice(LAUNCHERS)
        drawn = draw.choice([2, 2, 3]), draw.randrange(4), *where, draw.randrange(1 << 30)
        settings = Settings(kills, *drawn, deadline=begin + seconds)
        with tempfile.TemporaryDirectory(prefix="shardwell-campaign-") as folder:
            try:
                report = run_job(Path(folder), settings)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                result.count("job that failed", f"{settings}: {error}")
                continue
        kills = len(report.kills)
        for kill in report.kills:
            result.count(WORDS[kill.moment])
            result.took("the last survivor's end after a kill", kill.survived)
        result.bad += [f"{settings}: not so: {claim}: {problem}" for claim, problem in report.checks.items() if problem]
        result.figures.update(
            {
                "jobs": 1,
                f"kills under {settings.launcher if settings.launcher != 'none' else 'no launcher'}": kills,
                f"kills with state on {settings.tier}": kills,
                "micro-steps repeated": report.repeated,
                "checkpoints verified after kills": sum(kill.verified for kill in report.kills),
            }
        )
    result.seconds = round(time.monotonic() - begin, 1)
    return result


if __name__ == "__main__":
    preloaded.install()  # a rank that has been killed is there again in a fraction of a second
    sys.exit(command_line(campaign, "tests.campaigns.kills", __doc__))
