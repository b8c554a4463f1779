"""What a plain run does not import: a feature that is off costs nothing, not even its modules."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.command import environment
from tests.support.patience import HANG

PROGRAM = """
import importlib.util, sys, torch, shardwell
for stage in (0, 3):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    adam = {"type": "AdamW", "params": {"lr": 0.1}}
    config = {"zero_optimization": zero, "optimizer": adam, "gradient_clipping": 1.0}
    engine, *_ = shardwell.initialize(model=model, config={**config, "shardwell": {"shard_at_world_one": True}})
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    engine.save_checkpoint(f"{sys.argv[1]}/{stage}")
    engine.load_checkpoint(f"{sys.argv[1]}/{stage}")
print(*[name for name in sys.modules if name.startswith(("shardwell.offload", "shardwell.compat"))])
if importlib.util.find_spec("deepspeed") is not None:
    print("deepspeed")
"""


@pytest.mark.slow
def test_a_run_without_offloading_and_deepspeeds_names_does_not_import_them(tmp_path: object) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=environment(fresh=True), capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
