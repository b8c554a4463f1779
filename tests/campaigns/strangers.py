"""A job on two hosts while a third party on the same network tries what it can; the job has to go on as if alone.

    python -m tests.campaigns.strangers --count 20 --minutes 10

Each round runs one job (a fixed number of nodes, or a range) from its start to its end under attack, and compares its
numbers with those of a job that was left alone, bit for bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.hosts import ADDRESSES
from benchmarks.launch import stop
from tests.campaigns.network import STRANGER, Network, why_no_network
from tests.campaigns.result import Result, command_line
from tests.support.command import ROOT, arguments, environment
from tests.support.patience import HANG

ATTACK = 15.0  # seconds that a job under attack takes at least
SCRIPT = """
import hashlib, os, sys, time
from pathlib import Path
import torch, shardwell
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
engine, *_ = shardwell.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})
(folder / f"began-{os.environ['RANK']}").touch()
draw = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
for step in range(20):
    engine.backward(engine(torch.randn(4, 16, generator=draw)).square().mean())
    engine.step()
    time.sleep(seconds / 20)
with shardwell.zero.GatheredParameters(list(model.parameters())):
    digest = hashlib.sha256(b"".join(p.detach().clone().numpy().tobytes() for p in model.parameters())).hexdigest()
(folder / f"digest-{os.environ['RANK']}").write_text(digest)
engine.destroy()
"""


def run_job(network: Network, folder: Path, nodes: str, attack: tuple[int, float] | None) -> tuple[str, dict[str, Any]]:
    """One job; its digest, or what went wrong, and what the stranger says. `attack` is a seed, and seconds."""
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(os.urandom(32).hex())
    seconds = attack[1] if attack else 0.0
    options = ["-n", "1", "--nnodes", nodes, "--master-addr", ADDRESSES[0], "--join-time", "60"]
    command = arguments("run", *options, folder / "script.py", folder, str(seconds))
    mark = {"SHARDWELL_CAMPAIGN_MARK": str(folder / "gained")}
    env = {**environment(), "SHARDWELL_SECRET_FILE": str(secret)}
    started: list[subprocess.Popen[str]] = []
    try:
        if attack is not None:
            tool = [sys.executable, "-m", "tests.campaigns.stranger", str(attack[0]), str(seconds + 4), *ADDRESSES]
            inside = network.inside(STRANGER, tool)
            own = {**environment(), **mark}
            own["PYTHONPATH"] = f"{ROOT}{os.pathsep}{own['PYTHONPATH']}"
            started.append(
                subprocess.Popen(
                    inside, env=own, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            )
        nodes_of = [network.inside(host, command) for host in (0, 1)]
        started += [subprocess.Popen(node, env=env, stderr=subprocess.PIPE, text=True) for node in nodes_of]
        launchers = started[-2:]
        said = [launcher.communicate(timeout=HANG)[1] for launcher in launchers]
        found = json.loads(started[0].communicate(timeout=HANG)[0]) if attack is not None else {}
    except subprocess.TimeoutExpired:
        return "did not end", {}
    finally:
        stop(started)
    if (folder / "gained").exists():
        found["gains"].append("a command was executed")
    if any(launcher.returncode for launcher in launchers):
        return f"failed: {' | '.join(said)}", found
    digests = {path.read_text() for path in folder.glob("digest-*")}
    return (digests.pop() if len(digests) == 1 else f"digests differ: {digests}"), found


def campaign(count: int, seed: int, seconds: float) -> Result:
    """So many jobs under attack, or until the time is over; one at least."""
    result, begin = Result("strangers"), time.monotonic()
    with tempfile.TemporaryDirectory() as name, Network() as network:
        folder = Path(name)
        alone, _ = run_job(network, folder / "alone", "2", None)
        if len(alone) != 64:
            raise SystemExit(f"a job that is left alone does not succeed: {alone}")
        while result.tried == 0 or (result.tried < count and time.monotonic() - begin < seconds):
            number = seed + result.tried
            nodes = ("2", "1:2")[number % 2]
            found, said = run_job(network, folder / str(number), nodes, (number, ATTACK))
            problems = [str(gain) for gain in said.get("gains", [])]
            problems += [found] if found != alone else []
            problems += [] if said.get("open") else ["the stranger found nothing that listens, so nothing was tried"]
            words = f"--nnodes {nodes}, seed {number}: {'; '.join(problems)}" if problems else ""
            result.count("disturbed" if problems else "as if alone", words)
            result.figures.update(said.get("tried", {}))
    result.seconds = round(time.monotonic() - begin, 1)
    return result


if __name__ == "__main__":
    if (refusal := why_no_network()) is not None:
        print(f"skipped: no hosts here: {refusal}")
        sys.exit(0)
    sys.exit(command_line(campaign, "tests.campaigns.strangers", __doc__))
