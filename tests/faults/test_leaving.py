"""A rank that leaves after its last step, in whatever way, takes nothing with it that slower ranks still receive."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import shardwell as command

SCRIPT = """
import gc, sys, time, torch, shardwell
from torch import nn
from shardwell.runtime.scheduler import Scheduler

update = Scheduler.after_update

def slowly(*args):
    time.sleep(0.3)  # meanwhile the other rank has finished its step
    return update(*args)

def train():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)])
    config = {"zero_optimization": {"stage": int(sys.argv[1])}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = shardwell.initialize(model=model, config=config)
    for last in (False, True):
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        Scheduler.after_update = slowly if last and engine.global_rank == 0 else update
        engine.step()
    return engine

train().destroy(whole=False)
print("destroyed")
train()
gc.collect()
print("freed")
engine = train()
print("ended")
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_slower_ranks_get_what_the_last_step_has_published(tmp_path: Path, stage: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = command("run", "-n", "2", "train.py", str(stage), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split()) == sorted(2 * ["destroyed", "freed", "ended"])
