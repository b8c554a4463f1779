"""An update that fails leaves values that are updated in part: no later call uses or saves them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwell
from tests.support.faults import fault_at

CALLS = {
    "forward": lambda engine, folder: engine(torch.ones(2, 8)),
    "step": lambda engine, folder: (engine.backward(engine(torch.ones(2, 8)).sum()), engine.step()),
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "state_dict": lambda engine, folder: engine.state_dict(),
    "optimizer state": lambda engine, folder: engine.optimizer.state_dict(),
}


@pytest.mark.parametrize("stage", [2, 3])
def test_after_a_failed_update_every_use_is_refused(tmp_path: Path, stage: int) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    config = {
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "gradient_clipping": 1.0,
    }
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    engine, *_ = shardwell.initialize(model=model, config=config, device="cpu")
    engine.backward(engine(torch.ones(2, 8)).sum())
    with fault_at("update on the host", fails):
        engine.step()
        with pytest.raises(shardwell.ShardwellError, match="no more memory"):
            engine.state_dict()
    for name, call in CALLS.items():
        with pytest.raises(shardwell.ShardwellError, match="no more memory"):
            raise AssertionError(f"{name} gave {call(engine, tmp_path)}")
    assert not list(tmp_path.iterdir())
    engine.destroy(whole=False)


def fails(*_args: object, **_options: object) -> None:
    raise shardwell.ShardwellError("no more memory")
