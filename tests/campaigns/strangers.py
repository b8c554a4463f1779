"""A job on two hosts while a third party on the same network tries what it can; the job has to go on as if alone.

    python -m tests.campaigns.strangers [--seconds 60] [--seed 1] [--json FILE]

Each round runs one job (a fixed number of nodes, or a range) from its start to its end under attack, and compares its
numbers with those of a job that was left alone, bit for bit. Exits with 1 if anything was gained, or a job differed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.hosts import ADDRESSES
from benchmarks.launch import stop
from tests.campaigns.network import STRANGER, Network, why_no_network
from tests.cli.command import ROOT, arguments, environment

ATTACK = 15.0  # seconds that a job under attack takes at least
LIMIT = 240.0  # seconds for a job that takes ten on an idle machine
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


@dataclass
class Tally:
    """What a campaign did, and what came of it."""

    jobs: int = 0
    tried: Counter[str] = field(default_factory=Counter)
    gains: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {"jobs": self.jobs, "tried": dict(self.tried), "gains": self.gains, "failures": self.failures}


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
        said = [launcher.communicate(timeout=LIMIT)[1] for launcher in launchers]
        found = json.loads(started[0].communicate(timeout=LIMIT)[0]) if attack is not None else {}
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


def campaign(seconds: float, seed: int, folder: Path) -> Tally:
    """Jobs under attack until the time is over; one at least."""
    tally, end = Tally(), time.monotonic() + seconds
    with Network() as network:
        alone, _ = run_job(network, folder / "alone", "2", None)
        if len(alone) != 64:
            raise SystemExit(f"a job that is left alone does not succeed: {alone}")
        while tally.jobs == 0 or time.monotonic() < end:
            nodes = ("2", "1:2")[(seed + tally.jobs) % 2]
            found, said = run_job(network, folder / str(tally.jobs), nodes, (seed + tally.jobs, ATTACK))
            tally.jobs += 1
            tally.tried.update(said.get("tried", {}))
            tally.gains += said.get("gains", [])
            if found != alone:
                tally.failures.append(f"--nnodes {nodes}, seed {seed + tally.jobs - 1}: {found}")
            if not said.get("open"):
                tally.failures.append("the stranger found nothing that listens, so nothing was tried")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (refusal := why_no_network()) is not None:
        print(f"skipped: no hosts here: {refusal}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tally = campaign(options.seconds, options.seed, Path(folder))
    text = json.dumps(tally.as_json(), indent=2)
    print(text)
    if options.json:
        options.json.write_text(text)
    return int(bool(tally.gains or tally.failures))


if __name__ == "__main__":
    sys.exit(main())
