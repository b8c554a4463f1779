"""Ray Train on a local cluster: workers of the example train, restart after a failure, and a later run goes on."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.command import ROOT, environment

EXAMPLE = ROOT / "examples" / "ray_train.py"
# Two runs in one cluster, because starting one takes long: with a failure, and on from there with one worker less.
PROGRAM = """
import runpy, sys
import ray
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
example, storage = sys.argv[1:]
first, later = storage + "/first", storage + "/later"
for more in (["--storage", first, "--workers", "2", "--steps", "6", "--fails-at", "3"],
             ["--storage", later, "--workers", "1", "--steps", "8", "--resume", first + "/shards"]):
    sys.argv = [example, "--save-every", "2", *more]
    runpy.run_path(example, run_name="__main__")
"""


def norms_of_plain_pytorch(num_steps: int) -> list[float]:
    """The norms of the gradients of all samples, with the example's model, data and optimizer."""
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    found = []
    for step in range(num_steps):
        x, y = example["batch"](step, 0, 1)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        found.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_workers_restart_after_a_failure_and_a_later_run_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(EXAMPLE), str(tmp_path)]
    variables = {**environment(), "OMP_NUM_THREADS": "1", "RAY_TMPDIR": "/tmp"}
    variables["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # a process for each group of workers
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "told to fail once" in done.stderr + done.stdout
    ends = re.findall(r"^step (\d+) loss \S+ norm (\S+)$", done.stdout, re.MULTILINE)
    norms = norms_of_plain_pytorch(8)
    assert [(int(step), float(norm)) for step, norm in ends] == [
        (6, pytest.approx(norms[5], rel=1e-5)),
        (8, pytest.approx(norms[7], rel=1e-5)),
    ]
