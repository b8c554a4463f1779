"""Scripts for DeepSpeed's pipelines run unchanged, at ZeRO stage 1, and train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwell.compat.deepspeed_api import groups
from shardwell.compat.deepspeed_api.initialization import initialize
from tests.support.as_deepspeed import MARK, results, run_ranks
from tests.support.ranks import Ranks

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


ASKING = f"""
import json
import deepspeed, torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import RepeatingLoader, groups
from torch import nn

deepspeed.init_distributed(dist_backend="gloo")
layers = [LayerSpec(nn.Linear, 8, 16), nn.ReLU(), LayerSpec(nn.Linear, 16, 16), torch.tanh, LayerSpec(nn.Linear, 16, 4)]
net = PipelineModule(layers, num_stages=2, loss_fn=nn.CrossEntropyLoss(), seed_layers=True,
                     activation_checkpoint_func=deepspeed.checkpointing.checkpoint)
config = {{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 1000,
           "optimizer": {{"type": "Adam", "params": {{"lr": 1e-2}}}}}}
engine, *_ = deepspeed.initialize(config=config, model=net, model_parameters=list(net.parameters()))


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed + groups.get_data_parallel_rank())
    while True:
        yield torch.randn(2, 8, generator=generator), torch.randint(4, (2,), generator=generator)


def said(what):
    try:
        return "nothing: " + str(what())
    except Exception as error:
        return type(error).__name__ + ": " + str(error)


def sum_over(group):
    total = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(total, group=group)
    return total.item()


found = {{"rank": engine.global_rank}}
iterator = rows()
first = [engine.train_batch(iterator).item(), engine.train_batch().item()]  # the iterator is kept
found["trained"] = [first, engine.module.eval() is net, engine.train_batch().item(), engine.module.training]
engine.set_dataloader(RepeatingLoader([next(iterator) for _ in range(4)]))
found["loader"] = engine.train_batch().item()
loss, logits = engine.eval_batch(rows(7), return_logits=True)
outputs = engine.eval_batch(rows(7), compute_loss=False, reduce_output=None, num_micro_batches=3)
found["evaluated"] = [
    loss.item(), logits is None or list(logits.shape), outputs is None or [list(one.shape) for one in outputs],
    engine.eval_batch(rows(7), bcast_loss=False) is None,
]
engine.set_batch_fn(lambda batch: (torch.zeros_like(batch[0]), batch[1]))
found["changed"] = engine.eval_batch(rows(7)).item()
engine.set_batch_fn(None)
grid = engine.grid
found["places"] = [
    engine.stage_id, engine.num_stages, engine.prev_stage, engine.next_stage, engine.is_first_stage(),
    engine.get_data_parallel_rank(), engine.get_model_parallel_rank(), engine.get_pipeline_parallel_rank(),
    groups.get_data_parallel_world_size(), grid.get_pipe_parallel_world_size(), grid.stage_to_global(1),
    grid.get_data_parallel_group_ranks(), grid.pp_group, net.stage_owner(4), net.mpu().get_stage_id(),
    net.topology().get_rank_repr(engine.global_rank, omit_axes=["data"]), engine.micro_batches,
]
found["sums"] = [sum_over(one) for one in (groups.get_data_parallel_group(), grid.get_pipe_parallel_group(),
                                           groups.get_model_parallel_group(), groups.get_tensor_model_parallel_group())]
with torch.no_grad():
    found["refused"] = [said(engine.train_batch)]
found["refused"] += [said(one) for one in (
    lambda: engine.train_batch([1, 2]), lambda: engine.eval_batch(rows(), reduce_output="sum"),
    lambda: net.save_state_dict("never"), lambda: net.mpu().get_data_parallel_group(), lambda: engine.nothing,
    lambda: net.topology().get_rank(pipe=9, data=0),
)]
print({MARK!r} + json.dumps(found), flush=True)
"""


def test_a_pipeline_engine_answers_as_deepspeeds(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ASKING)
    found = sorted(results(run_ranks(script, ranks=4)), key=lambda one: one["rank"])
    assert len(found) == 4
    for rank, one in enumerate(found):
        stage, data = divmod(rank, 2)
        assert [one[key] for key in ("trained", "loader", "changed")] == [
            found[0][key] for key in ("trained", "loader", "changed")
        ]
        assert one["trained"][3] is True  # train_batch trains in train()
        is_last = stage == 1
        shapes = [[2, 4], [[2, 4]] * 3] if is_last else [True, True]
        assert one["evaluated"] == [found[0]["evaluated"][0], *shapes, not is_last]
        pipe, line = [data, data + 2], [2 * stage, 2 * stage + 1]
        numbers = [stage, 2, stage - 1, stage + 1, stage == 0, data, stage, stage, 2, 2, data + 2]
        assert one["places"] == [*numbers, line, pipe, 1, stage, f"pipe_0{stage}", 4]
        across = sum(10**other for other in pipe)
        assert one["sums"] == [sum(10**other for other in line), across, across, 10**rank]
        for words, start in zip(
            one["refused"],
            [
                "_NoGradientsError: train_batch() requires gradients enabled",
                "ShardwellError: train_batch takes the next micro-batches of an iterator, and got a list",
                "ShardwellError: eval_batch(reduce_output='sum', compute_loss=True): losses are averaged",
                "_NotHereError: PipelineModule.save_state_dict is not offered: engine.save_checkpoint",
                "ShardwellError: this PipelineParallelGrid has no process groups: ask the engine's grid",
                "AttributeError: 'DeepSpeedEngine' object has no attribute 'nothing'",
                "_NoSuchPointError: ProcessCoord(pipe=9, data=0) is not in a topology of 2 (pipe) x 2 (data)",
            ],
            strict=True,
        ):
            assert words.startswith(start)


def asked_of_groups() -> list[Any]:
    """Who shares what with whom by `deepspeed.utils.groups`, while an engine cuts tensors, and after it."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    tensor = {"autotp_size": 2, "plan": {"0": "colwise", "1": "rowwise"}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = initialize(model=model, config={**config, "tensor_parallel": tensor})
    found = [groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()]
    found += [groups.get_tensor_model_parallel_rank(), groups.get_model_parallel_world_size()]
    found += [engine.get_data_parallel_rank(), engine.get_tensor_parallel_rank(), engine.autotp_size()]
    found += [groups.get_tensor_model_parallel_src_rank()]
    engine.destroy()
    return [*found, groups.get_data_parallel_rank()]


def test_groups_answer_by_the_axes_of_the_engine(ranks: Ranks) -> None:
    """Scripts choose their rows by it: ranks that share tensors read the same ones."""
    for rank, found in enumerate(ranks.run(4, asked_of_groups)):
        data, tensor = divmod(rank, 2)
        assert found == [data, 2, tensor, 2, data, tensor, 2, 2 * data, rank]
