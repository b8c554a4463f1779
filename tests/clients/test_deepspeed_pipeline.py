"""A script for DeepSpeed's pipelines runs unchanged, at ZeRO stage 1, and trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.as_deepspeed import MARK, results, run_ranks

pytestmark = pytest.mark.slow

SCRIPT = f"""
import json
import deepspeed, shardwell, torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import nn

deepspeed.init_distributed(dist_backend="gloo")
rows = torch.Generator().manual_seed(0)
trainset = [(torch.randn(8, generator=rows), torch.randint(4, (), generator=rows)) for _ in range(64)]
layers = [LayerSpec(nn.Linear, 8, 16), nn.ReLU(), LayerSpec(nn.Linear, 16, 16), torch.tanh, LayerSpec(nn.Linear, 16, 4)]
topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
net = PipelineModule(layers, topology=topology, loss_fn=nn.CrossEntropyLoss(), seed_layers=True)
assert topology.get_rank(pipe=1, data=0) == 2 and topology.get_axis_comm_lists("pipe") == [[0, 2], [1, 3]]
config = {{
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 1000,
    "optimizer": {{"type": "Adam", "params": {{"lr": 1e-2}}}},
}}
engine, _, _, _ = deepspeed.initialize(
    config=config, model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], training_data=trainset
)
assert isinstance(engine, deepspeed.PipelineEngine)
losses = [engine.train_batch().item() for _ in range(4)]
for whole in (engine.module_state_dict, lambda: engine.save_16bit_model("never")):
    try:
        whole()
        raise SystemExit("a part of the model passed for all of it")
    except shardwell.ShardwellError as error:
        assert "in a pipeline a rank has its own stages only: call save_checkpoint" in str(error)
print({MARK!r} + json.dumps([engine.global_rank, losses, engine.zero_optimization_stage()]), flush=True)
"""


def test_a_pipeline_module_trains_from_a_data_set(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = results(run_ranks(script, ranks=4))
    assert len(found) == 4
    first = found[0][1]
    assert all(losses == first and stage == 1 for _, losses, stage in found)
    modules = []
    for index, build in enumerate(
        [lambda: nn.Linear(8, 16), nn.ReLU, lambda: nn.Linear(16, 16), nn.Tanh, lambda: nn.Linear(16, 4)]
    ):
        torch.manual_seed(1234 + index)
        modules.append(build())
    model = nn.Sequential(*modules)
    rows = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, generator=rows), torch.randint(4, (), generator=rows)) for _ in range(64)]
    # An epoch has 64 samples, of which a step takes 16: the mean over four steps sees each of them once.
    inputs, labels = (torch.stack(list(column)) for column in zip(*data, strict=True))
    before = nn.functional.cross_entropy(model(inputs), labels).item()
    assert sum(first) / 4 == pytest.approx(before, abs=0.05)
    assert first[-1] < before
