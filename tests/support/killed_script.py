"""Ranks without a launcher, of which one is killed: `python -m tests.support.killed_script FOLDER`.

Prints a line of JSON for each scenario: what the survivor raised, and after how many seconds. Ranks are forked from
this process once torch is imported, because importing it takes longer than all of them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch

import shardwell
from tests.support.models import Gpt, batches, zero

# who is killed, and what the others are about to do then
SCENARIOS = [(1, "save"), (0, "save"), (0, "forward"), (1, "step")]


def survive(rank: int, victim: int, what: str, port: int, folder: Path) -> dict[str, object]:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE="2", SHARDWELL_DEVICE="cpu",
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=zero(3))
    batch = batches(1, 2)[0]
    engine.backward(engine(batch))
    engine.step()
    if what == "step":
        loss = engine(batch)
    time.sleep(1.5)  # until neighbours know of each other, as they do in a job of any length
    begin = time.monotonic()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if what == "save":
            engine.save_checkpoint(folder)
        elif what == "forward":
            for _ in range(3):
                engine.backward(engine(batch))
                engine.step()
        else:
            engine.backward(loss)
            engine.step()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}
    return {"error": "", "text": "", "seconds": time.monotonic() - begin}


def play(victim: int, what: str, folder: Path) -> dict[str, object]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answer = folder / f"{victim}-{what}.json"
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            answer.write_text(json.dumps(survive(rank, victim, what, port, folder / f"{victim}-{what}")))
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    found: dict[str, object] = json.loads(answer.read_text())
    return {"victim": victim, "what": what, **found}


if __name__ == "__main__":
    for victim, what in SCENARIOS:
        print(json.dumps(play(victim, what, Path(sys.argv[1]))), flush=True)
