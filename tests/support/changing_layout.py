"""A job that is killed as a pipeline, and that the launcher restarts with a tensor axis."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.packed_models import Leg, built, engine_of, train_step

NUM_RANKS, STEPS, VICTIM, LAST = 4, 4, 3, 2  # the victim ends itself after so many steps
LAYOUTS = [Leg(stages=2, zero=1), Leg(tensor=2, zero=3)]  # of the first start and of the second


def main(folder: Path) -> None:
    start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    leg = LAYOUTS[start]
    engine = engine_of(leg, built(start))
    engine.load_checkpoint(str(folder / "run"))
    for step in range(engine.global_steps, STEPS):
        if start == 0 and rank == VICTIM and step == LAST:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(engine, leg, step)
        engine.save_checkpoint(str(folder / "run"))
    whole = engine.state_dict()
    if rank == 0:
        torch.save(whole, folder / f"whole-{start}.pt")
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
