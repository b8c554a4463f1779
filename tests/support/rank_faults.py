"""One rank of a training run in which rank 1 does something wrong, and what the others get to know of it.

`python -m tests.support.rank_faults FOLDER FAULT` is one process of several; the launcher's variables are set. Each
rank writes what became of it to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import shardwell
from tests.support import preloaded
from tests.support.models import Gpt, batches, share, zero
from tests.support.ranks import hosts_of_their_own

STEPS, AT = 12, 4  # steps of a run, and the step in which rank 1 does what it does
SLEEP, TIMEOUT = 9.0, 3.0  # seconds that a slow rank sleeps, and after which the log names it
FAULTS = ("killed", "raising", "leaving", "diverging", "sleeping")


class BadBatchError(Exception):
    """An error of the user's own."""


def misbehave(fault: str, engine: shardwell.Engine, batch: torch.Tensor, folder: Path) -> None:
    """Do what the fault says, in code of the user's."""
    (folder / "begin").write_text(str(time.time()))
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raising":
        raise BadBatchError("row 17 is empty")
    if fault == "leaving":
        raise SystemExit(0)
    if fault == "sleeping":
        time.sleep(SLEEP)
    if fault == "diverging":
        with torch.no_grad():
            engine(batch)


def train(fault: str, folder: Path) -> str:
    """Train, and let the host wait for the device in each step, as a loop that prints its loss does."""
    torch.manual_seed(0)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = Gpt(width=32, blocks=3)
    config = zero(3, shardwell={"divergence_timeout": TIMEOUT})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
    for step, batch in enumerate(batches(STEPS, 4 * size)):
        mine = share(batch, rank, size)
        if rank == 1 and step == AT:
            misbehave(fault, engine, mine, folder)
        loss = engine(mine)
        engine.backward(loss)
        engine.step()
        loss.item()
    return "finished"


def main() -> None:
    folder, fault = Path(sys.argv[1]), sys.argv[2]
    logging.basicConfig(level=logging.WARNING)
    own = folder / f"{os.environ['RANK']}.json"
    try:
        answer = {"end": train(fault, folder)}
    except Exception as error:
        answer = {"end": type(error).__name__, "words": str(error)}
        raise
    finally:
        if "answer" in locals():
            begin = float((folder / "begin").read_text())
            own.write_text(json.dumps({**answer, "seconds": time.time() - begin}))
    if (group := torch.distributed.group.WORLD) is not None and fault == "sleeping":
        torch.distributed.barrier(group)
        torch.distributed.destroy_process_group()


def environments(num_ranks: int, *, on_gpu: bool) -> list[dict[str, str]]:
    """Return what the launcher tells each of several ranks on CPU, or on one GPU."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    cpu = {"SHARDWELL_DEVICE": "cpu", "LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    cpu[preloaded.VARIABLE] = "1"
    return [
        {**shared, "RANK": str(rank), **(hosts_of_their_own(rank) if on_gpu else {**cpu, "LOCAL_RANK": str(rank)})}
        for rank in range(num_ranks)
    ]


def outcomes(fault: str, folder: Path, environments: list[dict[str, str]], limit: float) -> list[dict[str, Any]]:
    """Run one process for each environment; return what each wrote, with its exit status and its log."""
    processes = []
    for rank, environment in enumerate(environments):
        command = [sys.executable, "-m", "tests.support.rank_faults", str(folder), fault]
        with (folder / f"{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT)
            )
    deadline, found = time.monotonic() + limit, []
    try:
        for rank, process in enumerate(processes):
            try:
                status: int | str = process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = f"still there after {limit:g} s"
            own, log_text = folder / f"{rank}.json", (folder / f"{rank}.log").read_text(errors="replace")
            answer = json.loads(own.read_text()) if own.exists() else {"end": "nothing"}
            found.append({"words": "", **answer, "status": status, "log": log_text})
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


CAUSES = {
    "killed": ("PeerError", "rank 1 is gone"),
    "raising": ("PeerError", "BadBatchError (row 17 is empty)"),
    "leaving": ("PeerError", f"rank 1 finished after {AT} batches"),
    "diverging": ("DivergenceError", "ranks diverge"),
}


def complaints(fault: str, found: list[dict[str, Any]], within: float) -> list[str]:
    """Return what is wrong with how the ranks other than rank 1 ended."""
    wrong = []
    for rank, answer in enumerate(found):
        ended = f"rank {rank}: {answer['end']}, status {answer['status']}\n{answer['log'][-3000:]}"
        if fault == "sleeping":
            wrong += [] if (answer["end"], answer["status"]) == ("finished", 0) else [ended]
        elif rank != 1:
            kind, words = CAUSES[fault]
            if (answer["end"], answer["status"]) != (kind, 1) or words not in answer["words"]:
                wrong.append(ended)
            elif answer["seconds"] > within:
                wrong.append(f"rank {rank} ended after {answer['seconds']:.1f} s, and may take {within:g} s")
    if fault == "sleeping" and "is waiting for rank 1, which is in" not in found[0]["log"]:
        wrong.append(f"the log does not name the slow rank:\n{found[0]['log'][-3000:]}")
    return wrong


if __name__ == "__main__":
    main()
