"""A pipeline of which one rank is killed, or leaves, at an operation: `python -m tests.support.killed_stage`.

Prints a line of JSON for each scenario: what each survivor raised, and after how many seconds. Ranks are forked from
this process once torch is imported, because importing it takes longer than all of them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from typing import Any

import torch

import shardwell
from tests.support.faults import fault_at
from tests.support.pipelines import Decoder, next_token_loss, pipeline_config, stream

NUM_RANKS = 4
# the rank that is killed, or leaves by sys.exit, and where
SCENARIOS = [(3, "1F2", "killed"), (0, "0B1", "killed"), (1, "0F3", "killed"), (2, "1F2", "exit")]


def survive(rank: int, victim: int, where: str, how: str, port: int) -> dict[str, object]:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(NUM_RANKS), SHARDWELL_DEVICE="cpu",
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = shardwell.pipeline.split(Decoder(), loss_fn=next_token_loss)
    engine, *_ = shardwell.initialize(model=model, config=pipeline_config(3, "1f1b"))
    batches = stream(3, engine.data_rank)
    engine.train_batch(batches)
    time.sleep(1.5)  # until neighbours know of each other, as they do in a job of any length

    def end(note: Any, engine: Any, operation: Any) -> None:
        if rank == victim and str(operation) == where:
            if how == "exit":
                sys.exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        note(engine, operation)

    begin = time.monotonic()
    try:
        with fault_at("operation of a pipeline", end):
            engine.train_batch(batches)
    except Exception as error:
        return {"rank": rank, "error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}
    return {"rank": rank, "error": "", "text": "", "seconds": time.monotonic() - begin}


def play(victim: int, where: str, how: str) -> list[dict[str, object]]:
    """Fork the ranks; return what the survivors say."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = []
    staying, leaving = os.pipe()
    for rank in range(NUM_RANKS):
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(reading)
            os.close(leaving)
            with os.fdopen(writing, "w") as out:
                json.dump(survive(rank, victim, where, how, port), out)
            os.read(staying, 1)  # a slower rank must not take it for the one that was killed
            os._exit(0)
        os.close(writing)
        pipes.append(reading)
    said = []
    for reading in pipes:
        with os.fdopen(reading) as text:
            said.append(text.read())
    os.close(leaving)
    os.close(staying)
    for _ in range(NUM_RANKS):
        os.wait()
    return [json.loads(words) for words in said if words]


if __name__ == "__main__":
    for scenario in SCENARIOS:
        json.dump(play(*scenario), sys.stdout)
        print(flush=True)
