"""Calls on files that fail at random moments: each fault is told in words, or changes nothing.

    python -m tests.campaigns.io_faults --count 1000 --minutes 10

A worker (`workers.py`) preloads a library (`faulty_files.c`) that lets one system call on a folder fail, or move only
half of its bytes, or lets all calls after it fail too. Faults hit saves, loads, and steps with states on disk. Whatever
happens: every committed checkpoint verifies, `latest` names one of them, a load changes everything or nothing, the
next save or load works, and numbers are those of a run without faults or there are none.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from tests.campaigns.result import Result, command_line
from tests.campaigns.workers import try_cases, work

GOOD = ("told", "unharmed", "not reached")
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOENT, errno.EMFILE, errno.EINTR, 0)
STEPS = 3  # of a run with states on disk
Layout = tuple[int, str, str]  # stage, tier, precision


class Faults:
    """The preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)

    def arm(self, at: int, error: int, stays: bool) -> None:
        self._library.faults_arm(at, error, int(stays))

    def disarm(self) -> int:
        return int(self._library.faults_disarm())


def folder() -> Path:
    return Path(os.environ["FAULTS_FOLDER"])


def made(layout: Layout) -> Any:
    """Return a new engine; the same values each time."""
    import torch

    import shardwell

    stage, tier, precision = layout
    place: dict[str, Any] = {"device": tier, **({"nvme_path": str(folder() / "drive")} if tier == "nvme" else {})}
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if tier != "device":
        zero["offload_optimizer"] = place
        if stage == 3:
            zero["offload_param"] = place | ({"max_in_cpu": 0} if tier == "nvme" else {})
    config = {
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "shardwell": {"shard_at_world_one": True},
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
    }
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(3)))
    engine, *_ = shardwell.initialize(model=model, config=config, device="cpu")
    return engine


def step(engine: Any, number: int) -> None:
    import torch

    inputs = torch.randn(4, 24, generator=torch.Generator().manual_seed(number))
    engine.backward(engine(inputs).float().square().mean())
    engine.step()


def values(engine: Any) -> str:
    """Return a checksum of all parameters."""
    found = hashlib.sha256()
    for name, tensor in sorted(engine.state_dict().items()):
        found.update(name.encode() + tensor.float().numpy().tobytes())
    return found.hexdigest()


@cache
def without_faults(layout: Layout) -> list[str]:
    """Return the checksum after each step, the one before the first included."""
    engine = made(layout)
    try:
        found = [values(engine)]
        for number in range(STEPS + 2):
            step(engine, number)
            found.append(values(engine))
        return found
    finally:
        engine.destroy(whole=False)


@cache
def num_calls(what: str, layout: Layout) -> int:
    """Return how many calls on the folder an action makes."""
    with tempfile.TemporaryDirectory(dir=folder()) as root:
        engine = made(layout)
        try:
            step(engine, 0)
            engine.save_checkpoint(root, "a")
            Faults().arm(-1, 0, False)
            ACTIONS[what](engine, root)
            return Faults().disarm()
        finally:
            engine.destroy(whole=False)


ACTIONS: dict[str, Any] = {
    "save": lambda engine, root: engine.save_checkpoint(root, "b"),
    "background save": lambda engine, root: (
        engine.save_checkpoint(root, "b", asynchronous=True),
        engine.finish_saving(),
    ),
    "load": lambda engine, root: engine.load_checkpoint(root),
    "train": lambda engine, root: [step(engine, number) for number in range(1, STEPS)],
}


def broken(root: str) -> str:
    """Return what is wrong with a folder of checkpoints; empty if nothing is."""
    from shardwell.checkpoint import Folder
    from shardwell.errors import CheckpointError

    checkpoints = Folder(Path(root))
    try:
        tags = checkpoints.tags()
        for tag in tags:
            manifest = checkpoints.open(tag)
            for file in manifest.files:
                with checkpoints.reader(tag, file, manifest) as reader:
                    for name in reader.entries:
                        reader.verify(name)
    except CheckpointError as error:
        return f"a committed checkpoint is broken: {error}"
    latest = Path(root, "latest").read_text().strip()
    return "" if latest in tags else f"latest names {latest!r} of {tags}"


def outcome_of(seed: int, number: int) -> str:
    """Return what became of one fault."""
    import shardwell

    outcome = ""
    draw = random.Random(f"{seed} {number}")
    what = draw.choice(list(ACTIONS))
    tier = "nvme" if what == "train" else draw.choice(["device", "device", "cpu", "nvme"])
    layout = (draw.randrange(4) if tier != "nvme" else draw.choice([2, 3]), tier, draw.choice(["fp32", "bf16"]))
    error = draw.choice(ERRORS)
    stays = error not in (0, errno.EINTR) and draw.random() < 0.3
    at = draw.randrange(max(num_calls(what, layout), 1))
    expected = without_faults(layout)
    words = f"{what}, {layout}, call {at}: {errno.errorcode.get(error, 'half')}{' for good' if stays else ''}"
    root = tempfile.mkdtemp(dir=folder())
    engine = made(layout)
    try:
        step(engine, 0)
        engine.save_checkpoint(root, "a")
        if what == "load":
            step(engine, 1)
        outcome = _hit(engine, what, root, (at, error, stays))
        wrong = outcome if outcome.startswith("raw") else _after(engine, what, root, outcome, expected)
        return f"wrong: {words}: {wrong}" if wrong else outcome
    except shardwell.ShardwellError as raised:
        if outcome == "told" and tier == "nvme":
            return outcome  # the engine has failed with its disk, and says so
        return f"wrong: {words}: afterwards {type(raised).__name__}: {str(raised)[:300]}"
    except Exception as raised:
        return f"wrong: {words}: afterwards {type(raised).__name__}: {str(raised)[:300]}"
    finally:
        Faults().disarm()
        engine.destroy(whole=False)
        shutil.rmtree(root, ignore_errors=True)


def _hit(engine: Any, what: str, root: str, fault: tuple[int, int, bool]) -> str:
    import shardwell

    Faults().arm(*fault)
    try:
        ACTIONS[what](engine, root)
    except shardwell.ShardwellError as error:
        str(error).encode()
        return "told"
    except Exception as error:
        return f"raw {type(error).__name__}: {str(error)[:300]}"
    finally:
        num_made = Faults().disarm()
    return "unharmed" if num_made > fault[0] else "not reached"


def _after(engine: Any, what: str, root: str, outcome: str, expected: list[str]) -> str:
    """Return what is wrong once the fault is over; empty if nothing is."""
    import shardwell

    if what == "train":
        try:  # a failed engine saves nothing and trains no more; an update may be found to have failed only now
            engine.save_checkpoint(root, "b")
            now = values(engine)
            step(engine, expected.index(now) if now in expected else 0)
        except shardwell.ShardwellError:
            return broken(root)
        if now not in expected:
            return "the values are none of a run without faults"
        return "" if outcome == "told" or now == expected[STEPS] else "the values differ"
    if wrong := broken(root):
        return wrong
    if what == "load":
        if outcome == "told" and _has_failed(engine):
            return ""
        if values(engine) not in ((expected[1],) if outcome != "told" else (expected[1], expected[2])):
            return "a load left other values than before or of the checkpoint"
        engine.load_checkpoint(root)
        return "" if values(engine) == expected[1] else "a second load gave other values"
    if values(engine) != expected[1]:
        return "a save changed values"
    if outcome != "told" and Path(root, "latest").read_text().strip() != "b":
        return "a save that went well is not the latest"
    step(engine, 1)
    engine.save_checkpoint(root, "c")
    if wrong := broken(root):
        return wrong
    step(engine, 2)
    engine.load_checkpoint(root)
    if values(engine) != expected[2]:
        return "what was saved after the fault is not what is loaded"
    left = [
        name for name in os.listdir(root) if name.startswith(".") and not name.startswith(".latest.")
    ]  # gone in 5 s
    return f"left behind: {left}" if left else ""


def _has_failed(engine: Any) -> bool:
    """Whether the engine refuses to be used, in words."""
    import shardwell

    try:
        values(engine)
    except shardwell.ShardwellError:
        return True
    return False


def campaign(count: int, seed: int, seconds: float) -> Result:
    result = Result("io_faults")
    with tempfile.TemporaryDirectory(prefix="shardwell-faults-") as home:
        library = Path(home, "faulty.so")
        source = Path(__file__).with_name("faulty_files.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        Path(home, "files", "drive").mkdir(parents=True)
        environment = {
            "LD_PRELOAD": str(library),
            "FAULTS_FOLDER": str(Path(home, "files")),
            "SHARDWELL_IO": random.Random(seed).choice(["threads", "python"]),  # io_uring makes no calls to fail
            "OMP_NUM_THREADS": "1",
        }
        return try_cases(result, "tests.campaigns.io_faults", (count, seed, seconds), GOOD, environment)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        warnings.simplefilter("ignore")
        work(outcome_of, *map(int, sys.argv[2:]))
    else:
        sys.exit(command_line(campaign, "tests.campaigns.io_faults", __doc__))
