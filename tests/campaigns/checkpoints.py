"""Changes checkpoints by chance and loads them, half of them at another number of ranks, stage or threshold.

    python -m tests.campaigns.checkpoints [--count 200] [--seed 0] [--minutes 1] [--jobs 1] [--json FILE]

Each is refused with a clear error and changes nothing, or is loaded with the values that were saved. Everything else
counts: a silent difference, another error, a rank that crashes, a rank that hangs. Exits with 1 if there was any.
Checkpoints of others have no checksums: of those only what their form can show is changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwell
from shardwell.checkpoint import checksums
from shardwell.checkpoint.export import to_dcp, to_safetensors
from shardwell.checkpoint.sources import open_source
from shardwell.errors import ShardwellError
from tests.campaigns.mutations import FOREIGN, OWN, Mutation, flip
from tests.models import Gpt, batches, share, zero
from tests.ranks import RankFailedError, Ranks

TAG = "step"
BLOCK = 256  # bytes; small, so that the small tensors here have many blocks
LAYOUTS = [(1, 0, 0), (1, 3, 0), (2, 1, 0), (2, 3, 0), (2, 3, 600), (3, 2, 0), (3, 3, 0)]  # ranks, stage, threshold
WRITERS = [(2, 3, 0), (3, 1, 0)]
BATCH = 12  # checkpoints that one group of ranks loads
LIMIT = 30.0  # seconds for one to be loaded


@dataclass(frozen=True)
class Trial:
    what: str  # which mutation
    said: str  # what it did
    source: str
    layout: tuple[int, int, int] | str
    is_other: bool  # than that of who wrote it
    path: str


@dataclass
class Tally:
    """What a campaign did, and what came of it."""

    seed: int = 0
    tried: int = 0
    elsewhere: int = 0  # at another layout
    refused: int = 0
    equal: int = 0
    silent: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # other than those that are meant for users
    crashes: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # refused, and yet something was changed
    by_mutation: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_well(self) -> bool:
        return not (self.silent or self.errors or self.crashes or self.hangs or self.changed)

    def count(self, trial: Trial, outcome: str) -> None:
        self.tried += 1
        self.elsewhere += trial.is_other
        self.by_mutation[trial.what] = self.by_mutation.get(trial.what, 0) + 1
        words = f"{trial.source} at {trial.layout}: {trial.what}: {trial.said}: {outcome}"
        if outcome in ("refused", "equal"):
            setattr(self, outcome, getattr(self, outcome) + 1)
        else:
            getattr(self, outcome.partition(":")[0]).append(words)

    def add(self, other: dict[str, Any]) -> None:
        for key, value in other.items():
            if key == "by_mutation":
                self.by_mutation = dict(Counter(self.by_mutation) + Counter(value))
            elif key == "seconds":
                self.seconds = max(self.seconds, value)
            elif key != "seed":
                setattr(self, key, getattr(self, key) + value)


# --- in the ranks -----------------------------------------------------------------------------------------------


def engine_of(stage: int, threshold: int) -> shardwell.Engine:
    torch.manual_seed(3)
    model = Gpt(width=24, blocks=2)
    config = zero(
        stage,
        zero_optimization={"stage3_param_persistence_threshold": threshold},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        shardwell={"shard_at_world_one": True},
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config).engine


def save(root: str, layout: tuple[int, int, int], steps: int) -> None:
    before, checksums.BLOCK = checksums.BLOCK, BLOCK
    try:
        engine = engine_of(*layout[1:])
        for batch in batches(steps, 6):
            engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
            engine.step()
        engine.save_checkpoint(root, TAG)
    finally:
        checksums.BLOCK = before


def digest(engine: shardwell.Engine) -> str:
    """Of all numbers that this rank holds, and that a load may change."""
    found = hashlib.sha256()
    for unit in engine._flow.units:
        unit.wait()
        for group in unit.groups:
            with group.opened_master():
                for run, master in group.runs:
                    for piece in run.pieces:
                        found.update(master[piece.in_shard - run.start :][: piece.numel].numpy().tobytes())
    for shard in engine.optimizer.shards:
        for key, value in sorted(engine.optimizer.state.get(shard.tensor, {}).items()):
            for piece in shard.pieces:
                at = piece.in_shard - shard.start
                part = value[at : at + piece.numel] if value.ndim else value
                found.update(key.encode() + part.numpy().tobytes())
    for buffer in engine.module.buffers():
        found.update(buffer.numpy().tobytes())
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    others = [engine.global_steps, engine.micro_steps, engine.global_samples, groups, engine.lr_scheduler.state_dict()]
    return hashlib.sha256(found.digest() + repr(others).encode()).hexdigest()


def load_all(layout: tuple[int, int, int], roots: list[str], whole: str, other: str, log: str) -> list[str]:
    """Loads each; what comes of it. What is loaded well is replaced by the other checkpoint."""
    engine = engine_of(*layout[1:])
    engine.load_checkpoint(whole)
    right = digest(engine)
    engine.load_checkpoint(other)
    before = digest(engine)
    answers = []
    for number, root in enumerate(roots):
        Path(log, f"{dist.get_rank()}").write_text(str(number))  # if this rank dies, it was here
        try:
            engine.load_checkpoint(root, strict=True)
        except ShardwellError:
            answers.append("refused" if digest(engine) == before else "changed")
        except Exception as error:
            answers.append(f"errors: {type(error).__name__}: {error}")
        else:
            answers.append("equal" if digest(engine) == right else "silent")
            engine.load_checkpoint(other)
    return answers


def read_all(paths: list[str], truths: list[str], num_parts: int, log: str) -> list[str]:
    """Reads each checkpoint in so many parts; what comes of it."""
    answers = []
    for number, (path, truth) in enumerate(zip(paths, truths, strict=True)):
        Path(log, "0").write_text(str(number))
        try:
            found = _read(path, num_parts)
        except ShardwellError:
            answers.append("refused")
        except Exception as error:
            answers.append(f"errors: {type(error).__name__}: {error}")
        else:
            expected = _read(truth, 1)
            answers.append("refused" if found.keys() != expected.keys() else "equal" if found == expected else "silent")
    return answers


def _read(path: str, num_parts: int) -> dict[str, str]:
    """Digests of all tensors, by name. Another set of names is what an engine refuses."""
    found: dict[str, Any] = {}
    for part in range(num_parts):
        source = open_source(path)
        try:
            for name, stored in source.tensors.items():
                first, last = (stored.numel * (part + at) // num_parts for at in (0, 1))
                kind = f"{stored.dtype} {stored.shape} {stored.order}"
                found.setdefault(name, hashlib.sha256(kind.encode())).update(
                    source.read(name, first, last).view(torch.uint8).numpy().tobytes()
                )
        finally:
            source.close()
    return {name: value.hexdigest() for name, value in found.items()}


# --- the campaign -----------------------------------------------------------------------------------------------


class Campaign:
    """Checkpoints, and what is done to them."""

    def __init__(self, folder: Path, seed: int, ranks: Ranks) -> None:
        self.folder, self.ranks, self.tally = folder, ranks, Tally(seed)
        self.draw = random.Random(seed)
        self._num_copies = 0
        self._log = folder / "log"
        self._log.mkdir()
        for layout in WRITERS:
            root = folder / _name(layout)
            ranks.run(layout[0], save, str(root / "whole"), layout, 3)
            ranks.run(layout[0], save, str(root / "other"), layout, 4)
        self._foreign = self._make_foreign()

    def _make_foreign(self) -> list[Path]:
        """Checkpoints of others: exports, and what DeepSpeed wrote."""
        source = open_source(self.folder / _name(WRITERS[0]) / "whole")
        to_safetensors(source, self.folder / "safetensors", max_file_bytes=20_000)
        to_dcp(source, self.folder / "dcp")
        source.close()
        deepspeed = Path(__file__).parents[1] / "checkpoint" / "deepspeed"
        cases = [path.parent for path in sorted(deepspeed.glob("*/latest"))]
        return [self.folder / "safetensors", self.folder / "dcp", *cases]

    def run(self, count: int, seconds: float) -> Tally:
        begin = time.monotonic()
        while self.tally.tried < count and time.monotonic() - begin < seconds:
            batch = min(BATCH, count - self.tally.tried)
            (self._try_foreign if self.draw.random() < 0.15 else self._try_own)(batch)
        self.tally.seconds = round(time.monotonic() - begin, 1)
        return self.tally

    def _try_own(self, batch: int) -> None:
        writer = self.draw.choice(WRITERS)
        is_other = self.draw.random() < 0.6
        layout = self.draw.choice([one for one in LAYOUTS if one != writer]) if is_other else writer
        root = self.folder / _name(writer)
        trials = []
        for _ in range(batch):
            copy = self._copy(root / "whole")
            what, mutate = _choose(OWN, self.draw)
            trials.append(Trial(what, mutate(copy / TAG, self.draw), root.name, layout, is_other, str(copy)))
        whole, other = str(root / "whole"), str(root / "other")
        self._judge(trials, layout[0], lambda paths: (load_all, layout, paths, whole, other, str(self._log)))

    def _try_foreign(self, batch: int) -> None:
        num_parts = self.draw.randrange(1, 5)
        trials, truths = [], {}
        for _ in range(batch):
            source = self.draw.choice(self._foreign)
            copy = self._copy(source)
            what, mutate = _choose(FOREIGN, self.draw)
            if source.name == "safetensors" and self.draw.random() < 0.5:
                what, mutate = "a bit of a header", OWN["a bit of a header"][0]
            elif source.name == "dcp" and self.draw.random() < 0.5:
                what, mutate = "a bit of the metadata", lambda folder, draw: flip(folder / ".metadata", draw)
            said = mutate(copy, self.draw)
            trials.append(Trial(what, said, source.name, f"{num_parts} parts", num_parts > 1, str(copy)))
            truths[str(copy)] = str(source)
        log = str(self._log)
        self._judge(trials, 1, lambda paths: (read_all, paths, [truths[path] for path in paths], num_parts, log))

    def _judge(self, trials: list[Trial], num_ranks: int, job: Any) -> None:
        """Runs a batch; if a rank dies or hangs, that one is counted and the rest is run again."""
        rest = list(trials)
        while rest:
            function, *arguments = job([trial.path for trial in rest])
            for path in self._log.iterdir():
                path.unlink()
            try:
                answers = self.ranks.run(num_ranks, function, *arguments, limit=60.0 + LIMIT * len(rest))
            except RankFailedError as error:
                reached = [int(path.read_text()) for path in self._log.iterdir()]
                guilty = rest[min(reached, default=0)]
                kind = "crashes" if "died with exit code" in str(error) else "hangs"
                kind = "errors" if kind == "hangs" and "did not answer" not in str(error) else kind
                self.tally.count(guilty, f"{kind}: {str(error)[-600:]}")
                rest.remove(guilty)
                continue
            for trial, each in zip(rest, zip(*answers, strict=True), strict=True):
                worst = next((one for one in each if one not in ("refused", "equal")), None)
                mixed = "silent" if len(set(each)) > 1 else each[0]  # some ranks have it, others do not
                self.tally.count(trial, worst or mixed)
            break
        for trial in trials:
            shutil.rmtree(Path(trial.path).parent)

    def _copy(self, source: Path) -> Path:
        self._num_copies += 1
        folder = self.folder / "copies" / str(self._num_copies)
        shutil.copytree(source, folder / source.name)
        other = source.parent / "other"
        if source.name == "whole":
            (folder / "other").symlink_to(other)
        return folder / source.name


def _name(layout: tuple[int, int, int]) -> str:
    return "ranks-{}-stage-{}-threshold-{}".format(*layout)


def _choose(table: dict[str, tuple[Mutation, int]], draw: random.Random) -> tuple[str, Mutation]:
    what = draw.choices(list(table), [weight for _, weight in table.values()])[0]
    return what, table[what][0]


def run(count: int, seed: int, seconds: float) -> Tally:
    ranks = Ranks()
    try:
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            return Campaign(Path(folder), seed, ranks).run(count, seconds)
    finally:
        ranks.close()


def run_beside(options: argparse.Namespace) -> Tally:
    """Several campaigns at once, each with a seed of its own, as one."""
    tally = Tally(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for job in range(options.jobs):
            count = options.count // options.jobs + (job < options.count % options.jobs)
            command = [sys.executable, "-m", __spec__.name, "--count", str(count)]
            command += ["--seed", str(options.seed * 1000 + job), "--minutes", str(options.minutes)]
            jobs.append(subprocess.Popen([*command, "--json", f"{folder}/{job}.json"], stdout=subprocess.DEVNULL))
        for number, job in enumerate(jobs):
            job.wait()
            path = Path(folder, f"{number}.json")
            if path.exists():
                tally.add(json.loads(path.read_text())["tally"])
            else:
                tally.crashes.append(f"campaign {number} ended with {job.returncode}")
    return tally


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.checkpoints", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=200, help="checkpoints to change and load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1.0, help="end after so long, whatever the count is")
    parser.add_argument("--jobs", type=int, default=1, help="campaigns beside each other; each has up to 3 processes")
    parser.add_argument("--json", type=Path, help="write what came of it to this file")
    options = parser.parse_args(arguments)
    if options.jobs > 1:
        tally = run_beside(options)
    else:
        tally = run(options.count, options.seed, 60 * options.minutes)
    versions = {"shardwell": shardwell.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if options.json is not None:
        options.json.write_text(json.dumps({"tally": asdict(tally), "versions": versions}, indent=2) + "\n")
    print(
        f"{tally.tried} tried, {tally.elsewhere} of them at another layout: {tally.refused} refused, {tally.equal} "
        f"loaded with equal values, {len(tally.silent)} silent differences, {len(tally.errors)} other errors, "
        f"{len(tally.changed)} refused and changed, {len(tally.crashes)} crashes, {len(tally.hangs)} hangs; "
        f"{tally.seconds:g} s"
    )
    for words in [*tally.silent, *tally.errors, *tally.changed, *tally.crashes, *tally.hangs]:
        print(f"  {words}")
    return 0 if tally.is_well and tally.tried else 1


if __name__ == "__main__":
    sys.exit(main())
