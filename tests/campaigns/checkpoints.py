"""Changes checkpoints by chance and loads them, half of them at another number of ranks, stage or threshold.

    python -m tests.campaigns.checkpoints --count 5000 --minutes 60 --jobs 2

Each is refused with a clear error and changes nothing, or is loaded with the values that were saved. Everything else
is bad: a silent difference, another error, a rank that crashes, a rank that hangs.
Checkpoints of others have no checksums: of those only what their form can show is changed.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
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
from tests.campaigns.result import Result, command_line
from tests.support.internals import units_of
from tests.support.models import Gpt, batches, share, zero
from tests.support.patience import soon
from tests.support.ranks import RankFailedError, Ranks

TAG = "step"
BLOCK = 256  # bytes; small, so that the small tensors here have many blocks
Layout = tuple[int, int, int, int]  # ranks, stage, threshold, ranks of the tensor axis
LAYOUTS: list[Layout] = [
    *((1, 0, 0, 1), (1, 3, 0, 1), (2, 1, 0, 1), (2, 3, 0, 1), (2, 3, 600, 1), (3, 2, 0, 1), (3, 3, 0, 1)),
    *((2, 2, 0, 2), (4, 3, 0, 2)),
]
WRITERS: list[Layout] = [(2, 3, 0, 1), (3, 1, 0, 1), (2, 2, 0, 2)]
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # ranges of one tensor, boxes of the other
BATCH = 12  # checkpoints that one group of ranks loads
LIMIT = 30.0  # seconds for one to be loaded
GOOD = ("refused", "loaded with equal values")


@dataclass(frozen=True)
class Trial:
    what: str  # which mutation
    said: str  # what it did
    source: str
    layout: Layout | str
    is_other: bool  # than that of who wrote it
    path: str


# --- in the ranks -----------------------------------------------------------------------------------------------


def engine_of(stage: int, threshold: int, tensor: int) -> shardwell.Engine:
    torch.manual_seed(3)
    model = Gpt(width=24, blocks=2)
    config = zero(
        stage,
        zero_optimization={"stage3_param_persistence_threshold": threshold},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        shardwell={"shard_at_world_one": True},
        tensor_parallel={"autotp_size": tensor, "plan": PLAN} if tensor > 1 else {},
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config).engine


def save(root: str, layout: Layout, steps: int) -> None:
    before, checksums.BLOCK = checksums.BLOCK, BLOCK
    try:
        engine = engine_of(*layout[1:])
        for batch in batches(steps, 6):
            engine.backward(engine(share(batch, engine.data_rank, engine.data_size)))
            engine.step()
        engine.save_checkpoint(root, TAG)
    finally:
        checksums.BLOCK = before


def digest(engine: shardwell.Engine) -> str:
    """Of all numbers that this rank holds, and that a load may change."""
    found = hashlib.sha256()
    for unit in units_of(engine):
        unit.wait()
        for group in unit.groups:
            with group.storage.open():
                for piece in (piece for run in group.spans for piece in run.pieces):
                    found.update(group.master[piece.in_shard :][: piece.numel].numpy().tobytes())
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


def load_all(layout: Layout, roots: list[str], whole: str, other: str, log: str) -> list[str]:
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
            answers.append("refused" if digest(engine) == before else "refused and changed")
        except Exception as error:
            answers.append(f"other error: {type(error).__name__}: {error}")
        else:
            answers.append("loaded with equal values" if digest(engine) == right else "silent difference")
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
            answers.append(f"other error: {type(error).__name__}: {error}")
        else:
            expected = _read(truth, 1)
            same = "loaded with equal values" if found == expected else "silent difference"
            answers.append("refused" if found.keys() != expected.keys() else same)
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
        self.folder, self.ranks, self.result = folder, ranks, Result("checkpoints")
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

    def run(self, count: int, seconds: float) -> Result:
        begin = time.monotonic()
        while self.result.tried < count and time.monotonic() - begin < seconds:
            batch = min(BATCH, count - self.result.tried)
            (self._try_foreign if self.draw.random() < 0.15 else self._try_own)(batch)
        self.result.seconds = round(time.monotonic() - begin, 1)
        return self.result

    def _count(self, trial: Trial, outcome: str) -> None:
        kind = outcome.partition(":")[0]
        words = f"{trial.source} at {trial.layout}: {trial.what}: {trial.said}: {outcome}"
        self.result.count(kind, "" if kind in GOOD else words)
        self.result.figures["at another layout"] += trial.is_other

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
                answers = self.ranks.run(num_ranks, function, *arguments, limit=soon(60.0 + LIMIT * len(rest)))
            except RankFailedError as error:
                reached = [int(path.read_text()) for path in self._log.iterdir()]
                guilty = rest[min(reached, default=0)]
                kind = "crash" if "died with exit code" in str(error) else "hang"
                kind = "other error" if kind == "hang" and "did not answer" not in str(error) else kind
                self._count(guilty, f"{kind}: {str(error)[-600:]}")
                rest.remove(guilty)
                continue
            for trial, each in zip(rest, zip(*answers, strict=True), strict=True):
                worst = next((one for one in each if one not in GOOD), None)
                mixed = "silent difference" if len(set(each)) > 1 else each[0]  # some ranks have it, others do not
                self._count(trial, worst or mixed)
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


def _name(layout: Layout) -> str:
    return "ranks-{}-stage-{}-threshold-{}-tensor-{}".format(*layout)


def _choose(table: dict[str, tuple[Mutation, int]], draw: random.Random) -> tuple[str, Mutation]:
    what = draw.choices(list(table), [weight for _, weight in table.values()])[0]
    return what, table[what][0]


def campaign(count: int, seed: int, seconds: float) -> Result:
    ranks = Ranks()
    try:
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            return Campaign(Path(folder), seed, ranks).run(count, seconds)
    finally:
        ranks.close()


if __name__ == "__main__":
    sys.exit(command_line(campaign, "tests.campaigns.checkpoints", __doc__))
