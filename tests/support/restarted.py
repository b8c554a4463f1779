"""A rank of a job that `shardwell run` starts again: rank 1 kills itself in the first start, and all resume.

It prints the starts and a digest of the parameters at the end. With "cuda" as the second argument the ranks are NCCL
ranks that share one GPU.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

from tests.support.ranks import hosts_of_their_own

STEPS, KILLED_AFTER = 6, 3


def main(folder: str, device: str, kills: str) -> None:
    """Train, save at each step, and die in the first start if the job is to be killed."""
    rank, ranks, start = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    if device == "cuda":
        os.environ.update(hosts_of_their_own(rank))
    import torch

    import shardwell
    from tests.support.models import Gpt, batches, share, whole_parameters, zero

    torch.manual_seed(0)
    model = Gpt(blocks=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(3)).engine
    engine.load_checkpoint(folder)
    first = engine.global_steps
    for number, batch in enumerate(batches(STEPS, 8)[first:], first + 1):
        engine.backward(engine(share(batch, rank, ranks).to(engine.device)))
        engine.step()
        engine.save_checkpoint(folder)
        if (kills, start, rank, number) == ("kills", 0, 1, KILLED_AFTER):
            os.kill(os.getpid(), signal.SIGKILL)
    values = whole_parameters(model)
    if rank == 0:
        digest = hashlib.sha256(b"".join(values[name].cpu().numpy().tobytes() for name in sorted(values))).hexdigest()
        print(f"start {start}, from step {first}: {digest}")


if __name__ == "__main__":
    main(*sys.argv[1:])
