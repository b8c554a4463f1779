"""Several NCCL ranks as two nodes on one GPU: losses follow plain PyTorch, and no step leaves bytes behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.command import free_port
from tests.support.library_route import NUM_RANKS, RANKS_PER_NODE, complaints

LIMIT = 240.0  # seconds, for all runs of all stages


def started(folder: Path, port: int, rank: int) -> subprocess.Popen[bytes]:
    """NCCL refuses two ranks of one host on one GPU, so each is a host of its own to NCCL, though not to the engine."""
    environment = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE),
        "LOCAL_RANK": str(rank % RANKS_PER_NODE), "NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo", "SHARDWELL_DEVICE": "cuda:0",
    }  # fmt: skip
    with (folder / f"{rank}.log").open("wb") as log:
        command = [sys.executable, "-m", "tests.support.library_route", str(folder)]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_losses_follow_plain_pytorch_and_no_step_leaves_bytes_behind(tmp_path: Path) -> None:
    port = free_port()
    processes = [started(tmp_path, port, rank) for rank in range(NUM_RANKS)]
    deadline = time.monotonic() + LIMIT
    try:
        codes = [process.wait(timeout=max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = "\n".join((tmp_path / f"{rank}.log").read_text()[-3000:] for rank in range(NUM_RANKS))
    assert codes == [0] * NUM_RANKS, logs
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    wrong = [words for answers in found for words in complaints(answers)]
    assert not wrong, "\n".join(wrong)
