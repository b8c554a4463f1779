"""A process that ends without destroying its process group ends with its own exit code."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.support.command import environment
from tests.support.patience import HANG

PROGRAM = """
import torch
from torch import nn
import shardwell
from shardwell.memory import Device, MemoryStats, TemporaryBuffers
from shardwell.parallel import Collectives, TrafficStats
from shardwell.parallel.mesh import world_mesh
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
optimizer = torch.optim.AdamW(model.parameters())
engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu")
engine.backward(engine(torch.ones(2, 8)).sum())
engine.step()
device = Device(torch.device("cpu"), keep_pages=False)
comm = Collectives(world_mesh(torch.device("cpu")), device, TrafficStats(), TemporaryBuffers(device, MemoryStats()))
for _ in range(100):  # gloo's worker threads are busy with these when Python ends
    comm.direct.all_reduce(torch.ones(1 << 18), torch.empty(1 << 18), 1.0, False)
print("done", flush=True)
"""


@pytest.mark.slow
def test_works_in_flight_do_not_abort_a_process_that_ends() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        env = {**environment(), **own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, stdout=pipe, stderr=pipe, text=True))
    for process in ranks:
        out, errors = process.communicate(timeout=HANG)
        assert out == "done\n", errors
        assert process.returncode == 0, errors
