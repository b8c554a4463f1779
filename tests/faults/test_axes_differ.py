"""Ranks of other pipeline stages, and ranks that are laid out in other ways, are told what differs; none trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwell
from shardwell.engine import consistency
from shardwell.errors import DivergenceError, ShardwellError
from shardwell.pipeline import LayerSpec, PipelineModule
from tests.support.pipelines import Decoder, next_token_loss, pipeline_config, stream
from tests.support.ranks import Ranks


def staged(differs: dict[str, Any], others: dict[str, Any] | None = None) -> shardwell.Engine:
    """An engine of two pipeline stages; rank 1 has another configuration, and so may the others."""
    torch.manual_seed(0)
    config = {**pipeline_config(1, "1f1b"), **(differs if dist.get_rank() == 1 else others or {})}
    model = shardwell.pipeline.split(Decoder(), loss_fn=next_token_loss)
    return shardwell.initialize(model=model, config=config).engine


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "clipping": ({"gradient_clipping": 0.25}, "gradient_clipping is 0.25 on rank 1 and 0.5 on rank 0"),
    "precision": ({"bf16": {"enabled": True}}, "bf16.enabled is true on rank 1 and false on rank 0"),
    "a stage of ZeRO": ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2 on rank 1 and 1 on rank 0"),
    "a stage to choose": (
        {"zero_optimization": {"stage": "auto"}},
        'zero_optimization.stage is "auto" on rank 1 and 1 on rank 0',
    ),
    "what is summed": ({"prescale_gradients": True}, "prescale_gradients is true on rank 1 and false on rank 0"),
    "what is skipped": ({"shardwell": {"nonfinite": "skip"}}, 'nonfinite is "skip" on rank 1 and "auto" on rank 0'),
    "a schedule": (
        {"pipeline": {"stages": 2, "schedule": "gpipe"}},
        'pipeline.schedule is "gpipe" on rank 1 and "1f1b" on rank 0',
    ),
    "a division": (
        {"pipeline": {"stages": 2, "partition": "uniform"}},
        'pipeline.partition is "uniform" on rank 1 and "best" on rank 0',
    ),
    "an optimizer": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.01}}},
        "optimizer's class is SGD on rank 1 and AdamW on rank 0",
    ),
    "a learning rate": ({"optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.01}}}, "lr is 0.5"),
    "a batch": ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2 on rank 1 and 4 on rank 0"),
}
AXES: dict[str, tuple[dict[str, Any], str]] = {
    "a pipeline": ({"pipeline": {"stages": 2}}, "pipeline.stages is 2 on rank 1 and 1 on rank 0"),
    "a tensor axis": ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size is 2 on rank 1 and 0 on rank 0"),
    "a sequence axis": ({"sequence_parallel_size": 2}, "sequence_parallel_size is 2 on rank 1 and 1 on rank 0"),
    "an expert axis": (
        {"shardwell": {"expert_parallel_size": 2}},
        "expert_parallel_size is 2 on rank 1 and 1 on rank 0",
    ),
}


def start_with_each(staged_configs: list[dict[str, Any]], configs: list[dict[str, Any]]) -> list[str]:
    """What is said of each configuration that rank 1 alone has, with and without stages; then of another version."""
    said = []
    for number, config in enumerate([*staged_configs, *configs]):
        is_staged = number < len(staged_configs)
        try:
            staged(config if is_staged else {"pipeline": {}, **config}, *([] if is_staged else [{"pipeline": {}}]))
            said.append("")
        except ShardwellError as error:
            said.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    try:
        with mock.patch.object(consistency, "__version__", f"0.0.{dist.get_rank()}"):
            staged({})
        said.append("")
    except ShardwellError as error:
        said.append(f"{type(error).__name__}: {error}")
    return said


def test_ranks_of_other_stages_or_with_other_axes_are_told_what_differs(ranks: Ranks) -> None:
    cases = [*CONFIGS.values(), *AXES.values()]
    wanted = [words for _, words in cases] + ["version of shardwell is 0.0.1 on rank 1"]
    configs = [config for config, _ in cases]
    for said in ranks.run(2, start_with_each, configs[: len(CONFIGS)], configs[len(CONFIGS) :]):
        for words, found in zip(wanted, said, strict=True):
            assert found.startswith(f"{DivergenceError.__name__}: ranks differ in initialize"), (words, found)
            assert words in found


def divide_other_models() -> list[str]:
    """Rank 1 has more blocks than rank 0, a frozen one, or other arguments of a layer."""
    said = []
    is_odd = dist.get_rank() == 1
    frozen = Decoder()
    frozen.blocks[0].requires_grad_(not is_odd)
    layers = [LayerSpec(nn.Linear, 4, 6 if is_odd else 5), LayerSpec(nn.Linear, 5, 4), nn.Tanh(), nn.Linear(4, 4)]
    for model in (
        shardwell.pipeline.split(Decoder(6 if is_odd else 4), loss_fn=next_token_loss),
        shardwell.pipeline.split(frozen, loss_fn=next_token_loss),
        PipelineModule(layers, num_stages=2, partition_method="uniform", loss_fn=nn.functional.mse_loss),
        PipelineModule(layers[2 * is_odd :], num_stages=2, partition_method="uniform", loss_fn=nn.functional.mse_loss),
    ):
        try:
            shardwell.initialize(model=model, config=pipeline_config(1, "1f1b"))
            said.append("")
        except ShardwellError as error:
            said.append(str(error))
        dist.barrier()
    return said


def test_stages_of_other_models_are_told_so(ranks: Ranks) -> None:
    for blocks, frozen, layer, fewer in ranks.run(2, divide_other_models):
        assert "parameter 'blocks.4.norm.weight' is float32 [8] on rank 1 and not there on rank 0" in blocks
        assert "parameter 'blocks.0.norm.weight' is float32 [8], frozen on rank 1 and float32 [8] on rank 0" in frozen
        assert "layer 0 is Linear(4, 6) on rank 1 and Linear(4, 5) on rank 0" in layer
        assert "layer 0 is Tanh on rank 1 and Linear(4, 5) on rank 0" in fewer


def change_on_one_stage(folder: str) -> dict[str, str]:
    """Rank 1's stage gets another rate or option after a step, and loads in another way."""
    said = {}
    for name, value in (("lr", 0.5), ("eps", 1e-3)):
        engine = staged({})
        batches = stream(3, engine.data_rank)
        engine.train_batch(batches)
        if dist.get_rank() == 1:
            engine.optimizer.param_groups[0][name] = value
        try:
            engine.train_batch(batches)
            said[name] = ""
        except ShardwellError as error:
            said[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    engine = staged({})
    engine.save_checkpoint(folder)
    try:
        engine.load_checkpoint(folder, load_optimizer_states=dist.get_rank() == 0)
        said["load"] = ""
    except ShardwellError as error:
        said["load"] = f"{type(error).__name__}: {error}"
    return said


def test_a_stage_that_changes_alone_or_loads_in_another_way_is_named(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(2, change_on_one_stage, str(tmp_path)):
        assert "DivergenceError: ranks differ in step: optimizer's lr is 0.5 on rank 1 and 0.01 on rank 0" in said["lr"]
        assert "optimizer's eps is 0.001 on rank 1" in said["eps"]
        assert "with_optimizer is False on rank 1 and True on rank 0" in said["load"]


def lay_out_otherwise() -> str:
    """Rank 0 has the axes of the others in another order."""
    names = ("dp", "tp") if dist.get_rank() else ("tp", "dp")
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=names), Decoder()
    with pytest.raises(DivergenceError) as caught:
        shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config={}, mesh=mesh)
    return str(caught.value)


def test_ranks_with_the_same_axes_in_another_order_are_told_so(ranks: Ranks) -> None:
    for words in ranks.run(4, lay_out_otherwise):
        assert "mesh of ranks is 2 (shard) x 2 (tensor) in the order [0, 2, 1, 3] on rank 0 and 2 (shard)" in words
